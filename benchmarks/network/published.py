"""Published figures of training over slow networks beside those of the same runs as the cost model predicts them.

`python benchmarks/network/published.py` prints each, and keeps them in `benchmarks/results/network-published.json`.
What a source leaves out (the batch of a device, what its network reaches) is assumed and said, and a model that has no
words here is another one, which is named; nothing is fitted to a figure. A published one holds where it is predicted
within 15 %, as steps are to be.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright import cost
from meshwright.catalog import load_cluster, load_model
from meshwright.catalog.decoders.shapes import GptStyle
from meshwright.cost.ways import met_over
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, MatrixCurve, NodeGroup, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Design, Plan, Recompute, Schedule, Sharding, Stage
from meshwright.spec.ranks import MatrixRank
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import GradientSync, SyncKind, usual_rounds

TOLERANCE = 0.15
ATTENTION = ("mixer.query", "mixer.key", "mixer.value", "mixer.output")
FORWARDS = ("transform.up", "transform.down")
WORDS = {SyncKind.DILOCO: "DiLoCo", SyncKind.EAGER: "eager", SyncKind.CO2: "CO2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published number and the same as predicted, of the designs named; written with `unit` behind it."""

    source: str
    published: float
    predicted: float
    designs: tuple[tuple[str, Design], ...]
    assumed: str
    unit: str = "x"

    @property
    def miss(self) -> float:
        return self.predicted / self.published - 1.0

    @property
    def line(self) -> str:
        """The row of a page's table."""
        return f"| {self.source} | {self.told(self.published)} | {self.told(self.predicted)} |"

    def told(self, number: float) -> str:
        """Three digits, or two after the point of what is below ten."""
        return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}{self.unit}"


def speed(design: Design) -> float:
    """Tokens a second of all devices."""
    return cost.predict(design).tokens_per_second


def sent(design: Design) -> float:
    """Bytes that a device sends in a step for gradients and to meet other learners."""
    line = cost.predict(design).step.find(LineName.OUTER)
    return sum(met.bytes for met in met_over(design, outer_bytes=line.bytes if line is not None else 0.0))


def faster(source: str, published: float, *, slow: Design, fast: Design, assumed: str) -> Figure:
    """`fast` over `slow` in tokens a second."""
    designs = (("before", slow), ("after", fast))
    found = speed(fast) / speed(slow)
    return Figure(source=source, published=published, predicted=found, designs=designs, assumed=assumed)


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


def meets(kind: SyncKind, *, every: int, learners: int, precision: Precision = Precision.FP32) -> GradientSync:
    return GradientSync(kind=kind, rounds=usual_rounds(kind, every=every, learners=learners, precision=precision))


def on_a100(devices: int, *, every: int) -> Design:
    """7B on so many A100 in nodes of eight, 80 Gbit/s TCP between them: AdamW over all of them, or CO2 in rounds of
    `every` steps."""
    base = load_cluster(f"{devices}xA100")
    group = base.groups[0]
    nic = replace(group.nic, bandwidth=80e9 / 8, latency_seconds=3e-5, efficiency=0.6, fits=(), sources={})
    cluster = replace(base, groups=(replace(group, nics=1, nic=nic),))
    model, nodes = load_model("llama-7b"), devices // 8
    layout = partial(design, model, cluster, length=2048, recompute=Recompute.FULL)
    if every == 0:
        return layout(replicate=1, shard=devices)
    return layout(replicate=nodes, shard=8, gradients=meets(SyncKind.CO2, every=every, learners=nodes))


def co2() -> list[Figure]:
    """CO2 (2401.16265): words a second of 128 A100, and what a device does of 128 over what it does of 16."""
    assumed = "7B, a sequence of 2,048 tokens a device and step; TCP reaches 0.6 of the line"
    found = [
        faster(
            "CO2 every 48 steps against AdamW, 128 A100, 80 Gbit/s",
            304_736 / 22_810,
            slow=on_a100(128, every=0),
            fast=on_a100(128, every=48),
            assumed=assumed,
        )
    ]
    for name, every, published in (("CO2 every 48 steps", 48, 1.06), ("CO2 every 12", 12, 0.86), ("AdamW", 0, 0.82)):
        few, many = on_a100(16, every=every), on_a100(128, every=every)
        found.append(
            Figure(
                source=f"{name}, a device of 128 over one of 16",
                published=published,
                predicted=speed(many) / speed(few) / 8.0,
                designs=(("16", few), ("128", many)),
                assumed=assumed,
                unit="",
            )
        )
    return found


def torchft() -> Figure:
    """torchft: 1B on 300 L40S over TCP, DiLoCo every 40 steps against HSDP2."""
    cluster, model = load_cluster("30x10xL40S"), load_model("llama-3.2-1b")
    layout = partial(design, model, cluster, replicate=30, shard=10, length=4096)
    gradients = meets(SyncKind.DILOCO, every=40, learners=30)
    return faster(
        "torchft, DiLoCo every 40 against HSDP2, 1B, 300 L40S",
        4000.0 / 1200.0,
        slow=layout(),
        fast=layout(gradients=gradients),
        assumed="nodes of ten, a sequence of 4,096 tokens a device and step; the preset's 100 Gbit/s, of which 0.6",
    )


def fewer_bytes() -> list[Figure]:
    """DiLoCo (2311.08105) in rounds of 500 and Streaming DiLoCo (2501.18512) in rounds of 100 of four bits: bytes of
    every step over theirs."""
    cluster, model = load_cluster("8x1xA100"), load_model("gpt2")
    layout = partial(design, model, cluster, replicate=8, length=1024)
    plain, narrow = layout(), layout(gradients=GradientSync(precision=Precision.BF16))
    found = []
    for name, published, kind, every, precision, before in (
        ("DiLoCo every 500, 8 learners: fewer bytes", 500.0, SyncKind.DILOCO, 500, Precision.FP32, plain),
        ("Streaming DiLoCo every 100, four bits: fewer bytes", 400.0, SyncKind.STREAMING, 100, Precision.INT4, narrow),
    ):
        after = layout(gradients=meets(kind, every=every, learners=8, precision=precision))
        found.append(
            Figure(
                source=name,
                published=published,
                predicted=sent(before) / sent(after),
                designs=(("every step", before), ("rounds", after)),
                assumed=f"gradients in {before.plan.gradients.precision.value}, GPT-2's decoder; bytes follow none",
            )
        )
    return found


def slow_link(kind: SyncKind, published: float, *, seconds: float) -> Figure:
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
    layout = partial(design, model, cluster, replicate=2, length=64, microbatch=4, precision=Precision.FP32)
    return faster(
        f"two ranks at 100 Mbit/s, {WORDS[kind]} every 20 against every step",
        published,
        slow=layout(),
        fast=layout(gradients=meets(kind, every=20, learners=2)),
        assumed=f"a step without the network takes {seconds:.3f} s, as those of the fast run did but for waiting",
    )


def thin(model: ModelSpec, ranks: Mapping[str, int], *, dense_layers: Collection[int] = ()) -> ModelSpec:
    """The model whose matrices of these names have those ranks, but in `dense_layers`."""
    blocks = [index for index, block in enumerate(model.blocks) if isinstance(block, Layer)]
    chosen = [block for place, block in enumerate(blocks) if place not in dense_layers]
    each = tuple(sorted(MatrixRank(name=name, rank=rank) for name, rank in ranks.items()))
    return model.with_ranks(dict.fromkeys(chosen, each))


def pufferfish() -> Figure:
    """Pufferfish (2103.03936): its Transformer of 48.98M parameters, of which 26.70M are left."""
    model = GptStyle(name="18 layers", layers=18, width=512, hidden=1_368, heads=8, vocab=9_521, positions=64).build()
    quarter = dict.fromkeys((*ATTENTION, *FORWARDS), 128)
    low = thin(model, quarter, dense_layers=range(3))
    base = load_cluster("16x1xV100-16GB")
    nic = replace(base.groups[0].nic, bandwidth=10e9 / 8, latency_seconds=3e-5, efficiency=0.6, fits=(), sources={})
    cluster = replace(base, groups=(replace(base.groups[0], nics=1, nic=nic),))
    layout = partial(design, cluster=cluster, replicate=16, length=32, microbatch=16, precision=Precision.FP32)
    return faster(
        "Pufferfish, a quarter of the rank, data parallel at 10 Gbit/s (up to)",
        1.64,
        slow=layout(model),
        fast=layout(low),
        assumed=(
            f"its Transformer as a decoder of 18 layers, three of them whole, with as much attention and feed-forward "
            f"({model.parameters / 1e6:.1f}M and {low.parameters / 1e6:.1f}M parameters; 49.0M and 26.7M are its own); "
            "16 V100, one a node, 256 sentences of 32 tokens a step; TCP reaches 0.6 of the line. The published one is "
            "the best of its models, with the epochs before the switch"
        ),
    )


def cuttlefish() -> Figure:
    """Cuttlefish (2305.02538): DeiT's matrices at half their rank, but the one behind attention."""
    model = GptStyle(name="DeiT-base's layers", layers=12, width=768, heads=12, vocab=1_000, positions=197).build()
    # Half the rank of one matrix of queries, keys and values leaves as many parameters as a third does of three.
    ranks = {**dict.fromkeys(ATTENTION[:3], 256), **dict.fromkeys(FORWARDS, 384)}
    low = thin(model, ranks)
    cluster = load_cluster("1x1xV100-16GB")
    layout = partial(design, cluster=cluster, replicate=1, length=197, microbatch=64, precision=Precision.FP16)
    return faster(
        "Cuttlefish, DeiT's ranks, one device (up to)",
        1.2,
        slow=layout(model),
        fast=layout(low),
        assumed=(
            f"DeiT-base's 12 layers as a decoder ({model.parameters / 1e6:.1f}M and {low.parameters / 1e6:.1f}M "
            "parameters), one V100, 64 images of 197 tokens; the published one is the best of its models, from the "
            "first epoch to the last, those before the switch and its search for ranks with them"
        ),
    )


def figures() -> list[Figure]:
    """Of two ranks they are those of the run on the calmer machine; compute is that of each fast run."""
    return [
        *co2(),
        torchft(),
        *fewer_bytes(),
        slow_link(SyncKind.DILOCO, 2145 / 474, seconds=0.382),
        slow_link(SyncKind.EAGER, 2145 / 520, seconds=0.520),
        slow_link(SyncKind.CO2, 2145 / 423, seconds=0.423),
        pufferfish(),
        cuttlefish(),
    ]


def raw(found: Sequence[Figure]) -> dict[str, object]:
    return {
        each.source: {
            "published": each.published,
            "predicted": each.predicted,
            "assumed": each.assumed,
            "step_seconds": {name: cost.predict(made).step_seconds for name, made in each.designs},
        }
        for each in found
    }


def main() -> None:
    found = figures()
    for each in found:
        print(f"{each.source}: published {each.told(each.published)}, predicted {each.told(each.predicted)}")
        print(f"    assumed: {each.assumed}")
        for name, entry in each.designs:
            report = cost.predict(entry)
            per_device = report.tokens_per_second / report.devices
            print(f"    {name}: {report.step_seconds:.3f} s a step, {per_device:,.0f} tokens/s a device")
    rows = [
        record.Row(
            name=each.source,
            target=f"{each.told(each.published)} within {100 * TOLERANCE:.0f} %",
            measured=f"{each.told(each.predicted)} ({100 * each.miss:+.0f} %)",
            holds=abs(each.miss) <= TOLERANCE,
        )
        for each in found
    ]
    record.finish("network-published", rows, raw(found))


if __name__ == "__main__":
    main()
