"""Designs to export: what the search lists for models of the catalog, and what a plan can say beyond that."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from meshwright import catalog
from meshwright.search import Scope, check, enumerate_plans
from meshwright.spec.cluster import Precision
from meshwright.spec.job import Decay, JobSpec, LearningRate
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Exchange,
    ExchangeKind,
    ExpertGrid,
    GradientSync,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)
from tests.support.space import even

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-39b")
LENGTH = 4096


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
    machines = catalog.load_cluster(f"{max(8, world)}xH100")
    blocks, stages = len(spec.blocks), pipeline * chunks
    v_shaped = kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V)
    starts = bounds or tuple(even(blocks)(pipeline, chunks))
    group = BlockGroup(
        start=0,
        stop=blocks,
        tensor=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
        sharding=sharding if shard * context > 1 else Sharding.NONE,
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
def listed(model: str) -> tuple[Design, ...]:
    """Every 40th plan that the search lists for `model` on 32 H100s, and no fewer than 50 of them."""
    spec, machines = catalog.load_model(model), catalog.load_cluster("32xH100")
    asked = JobSpec(sequence_length=LENGTH, batch_tokens=64 * LENGTH, total_tokens=10**10)
    table = enumerate_plans(spec, machines, asked, boundaries=even(len(spec.blocks))).table
    rows = range(0, len(table), max(1, min(40, len(table) // 50)))
    plans = (table.to_plan(row, model=spec.name, cluster=machines.name, sequence_length=LENGTH) for row in rows)
    return tuple(Design(model=spec, cluster=machines, job=asked, plan=plan) for plan in plans)


def is_legal(given: Design) -> bool:
    return not check(given, scopes=frozenset({Scope.PLAN}))


@st.composite
def anything(draw: st.DrawFn) -> Design:
    """A design whose every choice is drawn by itself: many are for no peer, and some for no runtime."""
    sizes = st.sampled_from((1, 2, 4))
    pipeline, context = draw(sizes), draw(sizes)
    kind = draw(st.sampled_from(ScheduleKind))
    v_shaped = kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V)
    looped = kind in (ScheduleKind.INTERLEAVED, ScheduleKind.BREADTH_FIRST)
    model = draw(st.sampled_from(MODELS))
    grid = ExpertGrid(expert=draw(sizes), tensor=draw(sizes)) if catalog.load_model(model).active_parameters else None
    with_experts = model in ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")
    return design(
        model,
        pipeline=pipeline,
        context=context,
        replicate=draw(sizes),
        shard=draw(sizes),
        tensor=draw(sizes),
        sequence_parallel=draw(st.booleans()),
        sharding=draw(st.sampled_from(Sharding)),
        recompute=draw(st.sampled_from(Recompute)),
        offload=draw(st.sampled_from((Offload.NONE, Offload.NONE, *Offload))),
        precision=draw(st.sampled_from(Precision)),
        kind=kind,
        chunks=2 if v_shaped else draw(st.sampled_from((2, 3))) if looped else 1,
        slices=2 if kind is ScheduleKind.SEQUENCE_1F1B else 1,
        microbatch=draw(sizes),
        microbatches=draw(st.sampled_from((8, 16))),
        exchange=Exchange(
            kind=draw(st.sampled_from(ExchangeKind)),
            inner=draw(st.sampled_from([size for size in (1, 2, 4) if context % size == 0])),
        ),
        experts=grid if with_experts and draw(st.booleans()) else None,
        gradients=draw(st.sampled_from((Precision.FP32, Precision.BF16))),
        decay=draw(st.sampled_from(Decay)),
    )
