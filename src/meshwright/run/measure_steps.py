"""Whole training steps of small models, timed as a run makes them. Runs in children."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from meshwright.run.allocator import keep_freed_memory
from meshwright.run.measure_device import tiny_model
from meshwright.run.measure_network import PEER_TIMEOUT
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.exchange import Exchange, ExchangeKind
from meshwright.spec.job import Constraints, Devices, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)

_WARM_UP_STEPS = 1
_LEAST_STEPS = 3


def probe_designs(cluster: ClusterSpec, *, ranks: int) -> tuple[Design, ...]:
    """Designs of `ranks` ranks whose step times tell the figures of `cluster` apart.

    In bf16 and, of one rank, in fp32 too; in fp32 alone where processors without arithmetic of bf16 emulate it.
    """
    narrow, middle, wide = (tiny_model(layers=layers, width=width, vocab=2048) for layers, width in _SHAPES)
    rates = cluster.groups[0].device.peak_flops
    emulated = rates[Precision.BF16] < _EMULATED * rates[Precision.FP32]
    precisions = (Precision.FP32,) if emulated else (Precision.BF16, Precision.FP32)
    design = partial(_design, cluster=cluster, precision=precisions[0])
    if ranks == 1:
        return (
            design(narrow, sequence=64),
            *(design(middle, precision=precision) for precision in precisions),
            *(design(wide, precision=precision) for precision in precisions),
            design(middle, microbatch=1),
            design(middle, recompute=Recompute.FULL),
        )
    if ranks == 2:
        return (
            design(middle, replicate=2),
            design(middle, shard=2, sharding=Sharding.OPTIMIZER),
            design(middle, shard=2, sharding=Sharding.PARAMETERS),
            design(middle, tensor=2),
            design(middle, tensor=2, sequence_parallel=True),
            design(middle, pipeline=2, microbatch=2),
            design(middle, context=2),
        )
    return (
        design(middle, replicate=4),
        design(middle, tensor=4),
        design(middle, pipeline=4, microbatch=1),
        design(middle, pipeline=2, shard=2, sharding=Sharding.OPTIMIZER, microbatch=2),
        design(middle, context=4),
        design(middle, context=4, exchange=ExchangeKind.GATHER),
    )


# (layers, width): one whose host time is most of it, one between, one whose products are most of it.
_SHAPES = ((6, 32), (6, 128), (3, 320))
_EMULATED = 0.5  # of the rate of fp32: arithmetic of half the bits is as fast at the least where it is there


def _design(
    model: ModelSpec,
    *,
    cluster: ClusterSpec,
    precision: Precision,
    sequence: int = 256,
    pipeline: int = 1,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    context: int = 1,
    exchange: ExchangeKind = ExchangeKind.RING,
    sharding: Sharding = Sharding.NONE,
    sequence_parallel: bool = False,
    recompute: Recompute = Recompute.NONE,
    microbatch: int = 4,
) -> Design:
    """Eight sequences a step and data rank, or all of them together in a pipeline; stages as even as blocks allow."""
    batch = 8 * replicate * shard if pipeline == 1 else 8
    blocks = len(model.layers) + 2
    bounds = [round(index * blocks / pipeline) for index in range(pipeline + 1)]
    axes = (
        (AxisName.PIPELINE, pipeline),
        (AxisName.REPLICATE, replicate),
        (AxisName.SHARD, shard),
        (AxisName.CONTEXT, context),
        (AxisName.TENSOR, tensor),
    )
    groups = [
        BlockGroup(
            start=bounds[index],
            stop=bounds[index + 1],
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            sharding=sharding,
            recompute=recompute,
            precision=precision,
        )
        for index in range(pipeline)
    ]
    microbatches = max(1, batch // (replicate * shard * microbatch))
    plan = Plan(
        model=model.name,
        cluster=cluster.name,
        axes=tuple(Axis(name=name, size=size) for name, size in axes),
        stages=tuple(Stage(rank=index, groups=(group,)) for index, group in enumerate(groups)),
        schedule=Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=microbatches),
        sequence_length=sequence,
        microbatch=microbatch,
        exchange=Exchange(kind=exchange),
    )
    job = JobSpec(
        sequence_length=sequence,
        batch_tokens=plan.batch_tokens,
        total_tokens=10**6,
        precision=precision,
        constraints=Constraints(devices=Devices.ANY),
    )
    return Design(model=model, cluster=cluster, job=job, plan=plan)


def measure_steps(*, rank: int, world: int, store: str, designs: Sequence[Design], seconds: float) -> tuple[float, ...]:
    """Seconds of one step of every design on this rank: the lower quartile of as many as fit in `seconds` for all.

    `store` is a file that the ranks share. Threads are those a run would use.
    """
    import torch
    import torch.distributed as dist

    cores = designs[0].cluster.groups[0].cores or 1
    torch.set_num_threads(max(1, cores // world))
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PEER_TIMEOUT)
    try:
        return tuple(_step_seconds(design, seconds=seconds / len(designs)) for design in designs)
    finally:
        dist.destroy_process_group()


def _step_seconds(design: Design, *, seconds: float) -> float:
    import torch
    import torch.distributed as dist

    from meshwright import parallel

    device = torch.device("cpu")
    mesh = parallel.build_mesh(design.plan, device_type="cpu", kv_heads=design.model.kv_heads)
    laid = parallel.lay(design, mesh, device=device, seed=0)
    optimizer = parallel.build_optimizer(laid, design.job.optimizer)
    plan = design.plan
    shape = (plan.microbatch * plan.schedule.microbatches, plan.sequence_length)
    tokens = torch.randint(0, design.model.vocab, shape)
    documents = torch.zeros(shape, dtype=torch.int32)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        laid.step(tokens, tokens, documents)
        laid.clip(design.job.optimizer.clip_norm)
        optimizer.step()
        return time.perf_counter() - start

    for _ in range(_WARM_UP_STEPS):
        first = step()
    count = torch.tensor([max(_LEAST_STEPS, min(40, int(seconds / max(first, 1e-4))))])
    dist.broadcast(count, 0)
    found = sorted(step() for _ in range(int(count)))
    return found[len(found) // 4]
