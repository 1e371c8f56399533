"""Published speeds of learners that meet in rounds beside those of the same ranks in every step, predicted again.

`python benchmarks/network/published.py` prints, for each pair, the published ratio of speeds and the predicted one.
What a source leaves out (the batch of a device, what its network reaches) is assumed and said; nothing is fitted to
the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright import cost
from meshwright.catalog import load_cluster, load_model
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, MatrixCurve, NodeGroup, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Design, Plan, Recompute, Schedule, Sharding, Stage
from meshwright.spec.synchronize import GradientSync, SyncKind, usual_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`fast` over `slow` in speed, as published and as their designs are predicted."""

    source: str
    published: float
    slow: Design
    fast: Design
    assumed: str = ""

    @property
    def predicted(self) -> float:
        slow, fast = (cost.predict(design) for design in (self.slow, self.fast))
        return fast.tokens_per_second / slow.tokens_per_second


def design(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    replicate: int,
    shard: int = 1,
    length: int,
    microbatch: int = 1,
    precision: Precision = Precision.BF16,
    recompute: Recompute = Recompute.NONE,
    gradients: GradientSync | None = None,
) -> Design:
    """One stage, fully sharded where there is a shard axis, one microbatch a step."""
    sharding = Sharding.PARAMETERS if shard > 1 else Sharding.NONE
    group = BlockGroup(start=0, stop=len(model.blocks), sharding=sharding, precision=precision, recompute=recompute)
    plan = Plan(
        model=model.name,
        cluster=cluster.name,
        axes=(Axis(name=AxisName.REPLICATE, size=replicate), Axis(name=AxisName.SHARD, size=shard)),
        stages=(Stage(rank=0, groups=(group,)),),
        schedule=Schedule(),
        sequence_length=length,
        microbatch=microbatch,
        gradients=gradients or GradientSync(),
    )
    job = JobSpec(sequence_length=length, batch_tokens=plan.batch_tokens, precision=precision)
    return Design(model=model, cluster=cluster, job=job, plan=plan)


def meets(kind: SyncKind, *, every: int, learners: int) -> GradientSync:
    return GradientSync(kind=kind, rounds=usual_rounds(kind, every=every, learners=learners))


def co2(every: int, published: float) -> Pair:
    """CO2 (2401.16265): 128 A100 in nodes of eight, 80 Gbit/s TCP between them; AdamW over all of them."""
    base = load_cluster("128xA100")
    group = base.groups[0]
    nic = replace(group.nic, bandwidth=80e9 / 8, latency_seconds=3e-5, efficiency=0.6, fits=(), sources={})
    cluster = replace(base, groups=(replace(group, nics=1, nic=nic),))
    model = load_model("llama-7b")
    common = {"length": 2048, "recompute": Recompute.FULL}
    return Pair(
        source=f"CO2, tau {every}, against AdamW: 128 A100, 80 Gbit/s",
        published=published,
        slow=design(model, cluster, replicate=1, shard=128, **common),
        fast=design(
            model,
            cluster,
            replicate=16,
            shard=8,
            gradients=meets(SyncKind.CO2, every=every, learners=16),
            **common,
        ),
        assumed="7B, a sequence of 2,048 tokens a device and step; TCP reaches 0.6 of the line",
    )


def torchft() -> Pair:
    """torchft: 1B on 300 L40S over TCP, DiLoCo every 40 steps against HSDP2."""
    cluster, model = load_cluster("30x10xL40S"), load_model("llama-3.2-1b")
    common = {"replicate": 30, "shard": 10, "length": 4096}
    gradients = meets(SyncKind.DILOCO, every=40, learners=30)
    return Pair(
        source="torchft, DiLoCo every 40 against HSDP2: 1B, 300 L40S",
        published=4000.0 / 1200.0,
        slow=design(model, cluster, **common),
        fast=design(model, cluster, gradients=gradients, **common),
        assumed="nodes of ten, a sequence of 4,096 tokens a device and step; the preset's 100 Gbit/s, of which 0.6",
    )


def slow_link(kind: SyncKind, published: float, *, seconds: float) -> Pair:
    """Two ranks over a shaped link, 4.807M parameters in fp32: the seconds of a step without the network are given.

    The link is as much faster as the preset has more parameters, so that its bytes take as long.
    """
    model = load_model("llama-5m")
    bits = 100e6 * model.parameters / 4.807e6
    device = DeviceSpec(
        name="worker",
        kind=DeviceKind.CPU,
        memory_bytes=8e9,
        memory_bandwidth=2e10,
        peak_flops={Precision.FP32: 1e15},
        matrix={Precision.FP32: MatrixCurve(fraction=1.0, half_m=0.0, half_n=0.0, half_k=0.0)},
        launch_seconds=0.0,
        step_overhead_seconds=seconds,
    )
    link = Link(bandwidth=bits / 8, latency_seconds=1e-4, efficiency=0.95)
    group = NodeGroup(name="hosts", device=device, num_nodes=2, devices_per_node=1, inside=link, nic=link, nics=1)
    cluster = ClusterSpec(name="two hosts", groups=(group,))
    common = {"replicate": 2, "length": 64, "microbatch": 4, "precision": Precision.FP32}
    return Pair(
        source=f"two ranks at 100 Mbit/s, {kind.value} every 20 against every step",
        published=published,
        slow=design(model, cluster, **common),
        fast=design(model, cluster, gradients=meets(kind, every=20, learners=2), **common),
        assumed=f"a step without the network takes {seconds:.3f} s, as those of the fast run did but for waiting",
    )


def pairs() -> list[Pair]:
    """Of two ranks the figures are those of the run on the calmer machine; compute is that of each fast run."""
    return [
        co2(48, 304_736 / 22_810),
        torchft(),
        slow_link(SyncKind.DILOCO, 2145 / 474, seconds=0.382),
        slow_link(SyncKind.EAGER, 2145 / 520, seconds=0.520),
    ]


def main() -> None:
    for pair in pairs():
        miss = pair.predicted / pair.published - 1.0
        print(f"{pair.source}: published {pair.published:.2f}x, predicted {pair.predicted:.2f}x ({miss:+.0%})")
        print(f"    assumed: {pair.assumed}")
        for name, entry in (("every step", pair.slow), ("rounds", pair.fast)):
            report = cost.predict(entry)
            each = report.tokens_per_second / report.devices
            print(f"    {name}: {report.step_seconds:.3f} s a step, {each:,.0f} tokens/s a device")


if __name__ == "__main__":
    main()
