"""Designs that a rule accepts or refuses, each by what is odd about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.schedule import planned as schedules
from meshwright.schedule import skip
from meshwright.spec.cluster import DeviceKind, Link, Precision
from meshwright.spec.job import Constraints, DataSpec, JobSpec, Source, Spike, SpikeSpec, Switch
from meshwright.spec.low_rank import Pufferfish
from meshwright.spec.model import MatrixRank, ModelSpec
from meshwright.spec.optimizer import Master, Muon, OptimizerSpec, ParameterGroup
from meshwright.spec.plan import (
    Design,
    ExpertGrid,
    Offload,
    Schedule,
    ScheduleKind,
    Sharding,
    TensorGrid,
    Training,
)
from meshwright.spec.routing import Routing
from meshwright.spec.skip import SkipSpec, Swap
from meshwright.spec.synchronize import GradientSync, Rounds, SyncKind
from tests.search import search_samples as samples

D = samples.design
HELD = {n: {"experts": ExpertGrid(expert=n), "of": samples.model(layer=samples.mixture_layer())} for n in (2, 4)}
DROPPING = Routing(capacity=1.0)
SHARDS_AWAY = {"offload": Offload.PARAMETERS, "sharding": Sharding.PARAMETERS}
HALF = samples.job(sequences=16)
SLICED = Schedule(kind=ScheduleKind.SEQUENCE_1F1B, microbatches=8, slices=4)
FEWER = samples.job(constraints=Constraints(devices="any"))
INTERLEAVED = Schedule(kind=ScheduleKind.INTERLEAVED, microbatches=8, chunks=2)


def planned(design: Design, **fields: object) -> Design:
    return replace(design, plan=replace(design.plan, **fields))


def of_kinds(design: Design, *kinds: DeviceKind) -> Design:
    """The same with as many devices of each of these kinds, each kind in nodes of its own."""
    (group,) = design.cluster.groups
    part = replace(group, devices_per_node=group.devices_per_node // len(kinds))
    groups = tuple(replace(part, name=kind.value, device=replace(part.device, kind=kind)) for kind in kinds)
    return replace(design, cluster=replace(design.cluster, groups=groups))


def emptied(design: Design, rows: int) -> Design:
    """The same with so many rows without a sequence, and a job that asks for the others."""
    plan = replace(design.plan, empty_rows=rows)
    return replace(design, plan=plan, job=replace(design.job, batch_tokens=plan.read_tokens))


def factoring(design: Design, *, steps: int = 100, **fields: Any) -> Design:
    """One that is to become low rank, of so many steps."""
    tokens = steps * design.job.batch_tokens
    return replace(design, job=replace(design.job, total_tokens=tokens, low_rank=Pufferfish(**fields)))


def leaping(entry: Design) -> Design:
    """The same, without batches that leap."""
    return replace(entry, job=replace(entry.job, spike=SpikeSpec(policy=Spike.SKIP)))


def met(kind: SyncKind = SyncKind.DILOCO, *, held: int = 0, **fields: Any) -> Design:
    gradients = GradientSync(kind=kind, rounds=Rounds(every=10, **fields))
    return planned(D(replicate=2, shard=1, **HELD.get(held, {})), gradients=gradients)


def tabled(*rows: str, **sizes: int) -> Schedule:
    """A schedule of eight microbatches by its table."""
    return Schedule(kind=ScheduleKind.TABLE, table=rows, **{"microbatches": 8, **sizes})


def on_paths(*paths: tuple[int, ...], share: float = 0.5, swap: Swap = Swap.NEIGHBOURS) -> Design:
    """Four stages, of eight microbatches that pass those of `paths`."""
    alike = skip.Line(forward=(1.0,) * 4, backward=(1.0,) * 4, transfer=(0.0,) * 4)
    made = skip.along(alike, paths)
    assert made is not None
    entry = D(pipeline=4, shard=1, microbatch=4, schedule=schedules.of(made.program, chunks=1))
    return replace(entry, job=replace(entry.job, skip=SkipSpec(share=share, swap=swap)))


def compiled(kind: ScheduleKind) -> Design:
    asked = D(schedule=Schedule(kind=kind, microbatches=8))
    return replace(asked, job=replace(asked.job, compile=Switch.ON))


def turned(design: Design) -> Design:
    """The design with its axes from the innermost outwards."""
    return planned(design, axes=tuple(reversed(design.plan.axes)))


def scheduled(design: Design, **fields: object) -> Design:
    return planned(design, schedule=replace(design.plan.schedule, **fields))


def regrouped(design: Design, stage: int = 0, **fields: object) -> Design:
    """The design with its stage's one group changed."""
    stages = list(design.plan.stages)
    stages[stage] = replace(stages[stage], groups=(replace(stages[stage].groups[0], **fields),))
    return planned(design, stages=tuple(stages))


def frozen(*stages: int, of: ModelSpec | None = None) -> Design:
    """A design whose stages of these indexes are not trained."""
    entry = D(of=of or samples.model())
    for stage in stages:
        entry = regrouped(entry, stage, training=Training.FROZEN)
    return entry


def tied() -> ModelSpec:
    model = samples.model()
    return replace(model, head=replace(model.head, tied=True))


def reranked(design: Design, *ranks: int) -> Design:
    stages = (replace(stage, rank=rank) for stage, rank in zip(design.plan.stages, ranks, strict=True))
    return planned(design, stages=tuple(stages))


def small_memory() -> Design:
    device = samples.device(memory_bytes=2**16)
    return D(on=samples.cluster(samples.nodes(of=device)))


def rounding() -> JobSpec:
    return replace(samples.job(), optimizer=OptimizerSpec(master=Master.BF16_STOCHASTIC))


def odd_length() -> Design:
    job = samples.job(length=129)
    return planned(D(asked=job), sequence_length=129)


def hosted() -> Design:
    link = Link(bandwidth=2e10, latency_seconds=1e-5)
    return D(offload=Offload.OPTIMIZER, on=samples.cluster(samples.nodes(host=link)))


def grouped(*names: str) -> Design:
    return replace(D(), job=replace(D().job, optimizer=Muon(groups=(ParameterGroup(names=names),))))


def tens() -> Design:
    """Of ten ranks five share what is sharded, and two hold different experts."""
    return D(
        pipeline=1,
        tensor=1,
        shard=5,
        replicate=2,
        experts=ExpertGrid(expert=2),
        of=samples.model(layer=samples.mixture_layer()),
        on=samples.cluster(samples.nodes(devices_per_node=10)),
        asked=samples.job(sequences=80),
        schedule=Schedule(microbatches=8),
        microbatch=1,
    )


def rounded() -> Design:
    device = samples.device()
    eight = replace(device, peak_flops={**device.peak_flops, Precision.FP8: 2e14})
    eight = replace(eight, matrix={**device.matrix, Precision.FP8: device.matrix[Precision.BF16]})
    schedule = Schedule(kind=ScheduleKind.ZERO_BUBBLE_H1, microbatches=8)
    return D(precision=Precision.FP8, schedule=schedule, on=samples.cluster(samples.nodes(of=eight)))


def gridded(grid: TensorGrid = TensorGrid.SQUARE, *, microbatch: int = 2, **fields: Any) -> Design:
    """Four tensor ranks, or eight on a cube, and sequences for each of their rows."""
    ranks = {"tensor": 4, "pipeline": 1, "shard": 2, "sequence_parallel": False, **fields}
    layout = D(schedule=Schedule(microbatches=32 // (ranks["shard"] * microbatch)), microbatch=microbatch, **ranks)
    return planned(layout, tensor_grid=grid)


def thin(design: Design) -> Design:
    """The design of a model whose first layer has a matrix of rank two."""
    ranks = {1: [MatrixRank(name="mixer.output", rank=2)]}
    return replace(design, model=design.model.with_ranks(ranks))


def of_text(**fields: str) -> JobSpec:
    """A job whose data are one source."""
    return replace(samples.job(), data=DataSpec(sources=(Source(path="rows.jsonl", **fields),)))


def constrained(**fields: object) -> Design:
    return D(asked=samples.job(constraints=Constraints(**fields)))
