"""Designs to export: what the search lists for models of the catalog, and what a plan can say beyond that."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from meshwright import catalog
from meshwright.search import enumerate_plans
from meshwright.spec.cluster import ClusterSpec, Link, Precision
from meshwright.spec.exchange import Exchange, ExchangeKind
from meshwright.spec.job import Decay, JobSpec, LearningRate
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    ExpertGrid,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)
from meshwright.spec.synchronize import GradientSync
from tests.support.space import even

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-39b")
WITH_EXPERTS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")
LENGTH = 2048


def design(
    model: str = "llama-3.1-8b",
    *,
    pipeline: int = 1,
    replicate: int = 1,
    shard: int = 8,
    context: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = True,
    sharding: Sharding = Sharding.OPTIMIZER,
    recompute: Recompute = Recompute.NONE,
    offload: Offload = Offload.NONE,
    precision: Precision = Precision.BF16,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    chunks: int = 1,
    slices: int = 1,
    microbatch: int = 1,
    microbatches: int = 8,
    exchange: Exchange | None = None,
    experts: ExpertGrid | None = None,
    gradients: Precision = Precision.FP32,
    bounds: tuple[int, ...] | None = None,
    decay: Decay = Decay.COSINE,
) -> Design:
    """A design on H100 nodes of 8, in stages as even as the blocks allow unless `bounds` says where they begin."""
    spec, world = catalog.load_model(model), pipeline * replicate * shard * context * tensor
    machines = able(world)
    blocks, stages = len(spec.blocks), pipeline * chunks
    divided = sharding if sharding is not Sharding.NONE or shard == 1 else Sharding.OPTIMIZER
    v_shaped = kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V)
    starts = bounds or tuple(even(blocks)(pipeline, range(pipeline * chunks), world))
    group = BlockGroup(
        start=0,
        stop=blocks,
        tensor=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
        sharding=divided if shard > 1 else Sharding.NONE,
        recompute=recompute,
        offload=offload,
        precision=precision,
    )
    sizes = (pipeline, replicate, shard, context, tensor)
    plan = Plan(
        model=spec.name,
        cluster=machines.name,
        axes=tuple(Axis(name=name, size=size) for name, size in zip(AxisName, sizes, strict=True)),
        stages=tuple(
            Stage(
                rank=min(index, stages - 1 - index) if v_shaped else index % pipeline,
                groups=(replace(group, start=starts[index], stop=starts[index + 1]),),
            )
            for index in range(stages)
        ),
        schedule=Schedule(kind=kind, microbatches=microbatches, chunks=chunks, slices=slices),
        sequence_length=LENGTH,
        microbatch=microbatch,
        gradients=GradientSync(precision=gradients),
        exchange=exchange or Exchange(),
        experts=experts,
    )
    asked = JobSpec(
        sequence_length=LENGTH,
        batch_tokens=plan.batch_tokens,
        total_tokens=plan.batch_tokens * 1000,
        learning_rate=LearningRate(decay=decay),
    )
    return Design(model=spec, cluster=machines, job=asked, plan=plan)


@cache
def able(devices: int) -> ClusterSpec:
    """H100 nodes, as if they multiplied in every precision and their host's memory were known."""
    machines = catalog.load_cluster(f"{devices}xH100")
    nodes = machines.groups[0]
    curve = nodes.device.matrix[Precision.BF16]
    device = replace(nodes.device, peak_flops=dict.fromkeys(Precision, 1e15), matrix=dict.fromkeys(Precision, curve))
    host = Link(bandwidth=6e10, latency_seconds=1e-5)
    return replace(machines, groups=(replace(nodes, device=device, host=host),))


@cache
def listed(model: str) -> tuple[Design, ...]:
    """About 150 of the plans that the search lists for `model` on 8 H100s, evenly spread over the table."""
    spec, machines = catalog.load_model(model), catalog.load_cluster("8xH100")
    asked = JobSpec(sequence_length=LENGTH, batch_tokens=16 * LENGTH, total_tokens=10**10)
    table = enumerate_plans(spec, machines, asked, boundaries=even(len(spec.blocks))).table
    rows = range(0, len(table), max(1, len(table) // 150))
    plans = (table.to_plan(row, model=spec.name, cluster=machines.name, sequence_length=LENGTH) for row in rows)
    return tuple(Design(model=spec, cluster=machines, job=asked, plan=plan) for plan in plans)


@st.composite
def anything(draw: st.DrawFn) -> dict[str, Any]:
    """Choices for `design`, each drawn by itself: many are for no peer, and some for no runtime."""
    sizes, plain = st.sampled_from((1, 1, 2, 4)), draw(st.booleans())
    pipeline, replicate, shard, context, tensor = (draw(sizes) for _ in range(5))
    kinds = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, *([] if plain else ScheduleKind))
    kind = draw(st.sampled_from(kinds if pipeline > 1 else kinds[:1]))
    v_shaped = kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V)
    looped = kind in (ScheduleKind.INTERLEAVED, ScheduleKind.BREADTH_FIRST)
    model = draw(st.sampled_from(MODELS))
    inner = draw(st.sampled_from([size for size in (1, 2, 4) if context % size == 0]))
    expert, divided = draw(sizes), draw(sizes)
    fits = model in WITH_EXPERTS and replicate * shard * context * tensor % (expert * divided) == 0
    return {
        "model": model,
        "pipeline": pipeline,
        "context": context,
        "replicate": replicate,
        "shard": shard,
        "tensor": tensor,
        "sequence_parallel": plain or draw(st.booleans()),
        "sharding": draw(st.sampled_from(Sharding)),
        "recompute": draw(st.sampled_from(Recompute)),
        "offload": Offload.NONE if plain else draw(st.sampled_from(Offload)),
        "precision": Precision.BF16
        if plain
        else draw(st.sampled_from([kind for kind in Precision if kind.multiplies])),
        "kind": kind,
        "chunks": 2 if v_shaped else draw(st.sampled_from((2, 3))) if looped else 1,
        "slices": 2 if kind is ScheduleKind.SEQUENCE_1F1B else 1,
        "microbatch": draw(sizes),
        "microbatches": draw(st.sampled_from((8, 16))),
        "exchange": Exchange(kind=draw(st.sampled_from(ExchangeKind)), inner=inner),
        "experts": ExpertGrid(expert=expert, tensor=divided) if fits else None,
        "gradients": Precision.FP32 if plain else draw(st.sampled_from((Precision.FP32, Precision.BF16))),
        "decay": draw(st.sampled_from(Decay)),
    }
