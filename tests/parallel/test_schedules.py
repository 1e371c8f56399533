"""Schedules whose stages lie in a V, wait for nobody or pass in a row: parity where the search's own plans are few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import PlanTable
from meshwright.cost.synchronize import turns
from meshwright.cost.traffic_turns import shares_turns
from meshwright.schedule.build import SPLIT, V_SHAPES
from meshwright.spec.plan import Recompute, ScheduleKind, Sharding, Stage
from tests.parallel.parity_cases import Documents
from tests.parallel.test_parity import check
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool

KINDS = sorted({*SPLIT, ScheduleKind.BREADTH_FIRST})
MODELS = models.all_models()


def chunks(kind: ScheduleKind) -> int:
    return 2 if kind in V_SHAPES or kind is ScheduleKind.BREADTH_FIRST else 1


# A model in turn on each: what is particular to it meets both halves of a backward.
LAYOUTS = (
    ("tied", Layout(pipeline=2, kind=ScheduleKind.DUAL_PIPE_V, chunks=2, batch=4, recompute=Recompute.SELECTIVE)),
    ("gpt", Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_V, chunks=2, batch=4)),
    ("sinks", Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H2, batch=1)),
    ("tied", Layout(shard=2, sharding=Sharding.PARAMETERS, kind=ScheduleKind.BREADTH_FIRST, chunks=6, batch=4)),
    ("latent", Layout(pipeline=2, kind=ScheduleKind.BREADTH_FIRST, chunks=3, batch=4)),
    ("tied", Layout(kind=ScheduleKind.BREADTH_FIRST, chunks=3, batch=4)),
    ("mixture_full", Layout(pipeline=2, tensor=2, kind=ScheduleKind.ZERO_BUBBLE_V, chunks=2, batch=4)),
    ("full_norm", Layout(pipeline=2, tensor=2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4, sequence_parallel=True)),
    ("tiny", Layout(pipeline=4, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=2)),
)
REPLICAS = [
    Layout(pipeline=2, replicate=2, shard=2, sharding=sharding, kind=kind, chunks=chunks(kind), batch=16)
    for kind in (ScheduleKind.ZERO_BUBBLE_H2, ScheduleKind.DUAL_PIPE_V)
    for sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS)
]


def test_stages_of_a_v_may_be_uneven(pool: Pool) -> None:
    uneven = design(models.model(layers=6), Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_V, chunks=2, batch=4))
    bounds, group = (0, 1, 5, 6, 8), uneven.plan.first_group
    stages = tuple(
        Stage(rank=stage.rank, groups=(replace(group, start=start, stop=stop),))
        for stage, start, stop in zip(uneven.plan.stages, bounds, bounds[1:], strict=False)
    )
    check(pool, replace(uneven, plan=replace(uneven.plan, stages=stages)), packed=Documents.TWO)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=str)
def test_a_schedule_gives_what_one_device_gives(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, design(MODELS[kind], layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.parametrize("layout", REPLICAS[1:3], ids=str)
def test_replicas_of_shards_reduce_what_halves_of_backwards_leave(pool: Pool, layout: Layout) -> None:
    """The last reduction has matrices' gradients alone, and replicas still sum all of them."""
    check(pool, design(MODELS["tied"], layout))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("kind", [ScheduleKind.BREADTH_FIRST, ScheduleKind.INTERLEAVED])
def test_microbatches_share_gathers_where_the_price_says_so(kind: ScheduleKind, count: int) -> None:
    plan = design(models.model(layers=8), Layout(pipeline=2, kind=kind, chunks=count, batch=4)).plan
    priced = turns(PlanTable.from_plan(plan))
    assert bool(np.all(priced > 1)) == shares_turns(plan)
    assert shares_turns(plan) == (kind is ScheduleKind.BREADTH_FIRST and count != 2)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_with_every_sharding_and_recompute(
    pool: Pool, kind: ScheduleKind, sharding: Sharding, recompute: Recompute
) -> None:
    data = {"replicate": 2} if sharding is Sharding.NONE else {"shard": 2}
    layout = Layout(pipeline=2, **data, kind=kind, chunks=chunks(kind), batch=8, sharding=sharding, recompute=recompute)
    for name in ("tied", "mixture_full", "full_norm"):
        check(pool, design(MODELS[name], layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REPLICAS, ids=str)
def test_every_replica_of_shards(pool: Pool, layout: Layout) -> None:
    check(pool, design(MODELS["tied"], layout))
