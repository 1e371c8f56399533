"""Every plan that the search can emit gives what one device gives, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from meshwright import search
from meshwright.search.decide import RUNTIME
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Axis, AxisName, Design, Recompute, ScheduleKind, Sharding
from tests.parallel import parity_cases
from tests.parallel.parity_cases import Documents, Outcome
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design, with_speed
from tests.support.pool import Pool
from tests.support.sampled import sampled
from tests.support.space import covering, emitted, pairs

BATCH = 8
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
MODEL = models.model()


@cache
def listed(ranks: int) -> list[Design]:
    """What the search lists without a context axis: tests/parallel/test_context.py has the plans with one."""
    return [entry for entry in emitted(MODEL, ranks=ranks, batch=BATCH) if entry.plan.context == 1]


# Drawn plans run on 4 and 8 ranks in every test; these do in the slow ones.
CASES = [entry for ranks in (1, 2) for entry in covering(listed(ranks))]
PARTS = 40

LAYOUTS = (
    Layout(shard=2, tensor=2, sharding=Sharding.PARAMETERS, sequence_parallel=True, batch=4),
    Layout(pipeline=2, tensor=2, sequence_parallel=True, recompute=Recompute.FULL, batch=4),
    Layout(pipeline=2, shard=2, sharding=Sharding.GRADIENTS, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=4),
)
KINDS = tuple(models.all_models())
# Two of three kinds of block are met in the drawn plans alone; the slow tests run all on every layout.
TURNS = [(kind, LAYOUTS[place // 3 % len(LAYOUTS)]) for place, kind in enumerate(KINDS) if place % 3 == 0]
TURNS += [(kind, layout) for kind in ("tied", "mixture_full") for layout in LAYOUTS if (kind, layout) not in TURNS]


@cache
def reference(model: ModelSpec, count: int, z_loss: float, packed: Documents) -> Outcome:
    return parity_cases.one_device(
        model, count=count, length=SEQUENCE, z_loss=z_loss, optimizer=OPTIMIZER, packed=packed
    )


def check(pool: Pool, entry: Design, *, packed: Documents = Documents.ONE) -> None:
    entry = replace(entry, job=replace(entry.job, optimizer=OPTIMIZER))
    found = pool.run(parity_cases.one_rank, entry, packed, ranks=entry.plan.world_size)
    parity_cases.compare(reference(entry.model, entry.plan.sequences, entry.job.z_loss, packed), found)


@pytest.mark.parametrize(
    ("layout", "sequences"),
    [
        (Layout(shard=3, sharding=Sharding.PARAMETERS, batch=9), 8),
        (Layout(replicate=3, batch=12, microbatch=2), 10),
        pytest.param(Layout(pipeline=2, replicate=2, batch=8), 7, marks=pytest.mark.slow),
        pytest.param(Layout(tensor=2, shard=3, sharding=Sharding.GRADIENTS, batch=9), 7, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_without_a_sequence_change_nothing(layout: Layout, sequences: int, pool: Pool) -> None:
    """Data ranks that do not divide the sequences of a step train them as one device does."""
    made = design(MODEL, layout)
    plan = replace(made.plan, empty_rows=layout.batch - sequences)
    job = replace(made.job, batch_tokens=plan.read_tokens, z_loss=1e-3)
    entry = replace(made, plan=plan, job=job)
    assert search.check(with_speed(entry), scopes=RUNTIME) == ()
    check(pool, entry, packed=Documents.TWO)


def name(entry: Design) -> str:
    return entry.plan.describe().replace(" ", "_")


def test_the_cases_meet_every_pair_of_choices_of_the_search() -> None:
    assert len(CASES) >= 60
    for ranks in (1, 2):
        possible = set().union(*(pairs(entry.plan) for entry in listed(ranks)))
        assert possible == set().union(*(pairs(entry.plan) for entry in CASES if entry.plan.world_size == ranks))


@pytest.mark.parametrize("entry", sampled(CASES, quick=15), ids=name)
def test_a_plan_of_the_search_gives_what_one_device_gives(pool: Pool, entry: Design) -> None:
    check(pool, entry, packed=Documents.TWO)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_other_plan_of_the_search_gives_it_too(pool: Pool, ranks: int, part: int) -> None:
    for entry in [entry for entry in listed(ranks) if entry not in CASES][part::PARTS]:
        check(pool, entry)


@pytest.mark.parametrize(("kind", "layout"), sampled(TURNS, quick=6), ids=str)
def test_kinds_of_blocks_give_what_one_device_gives(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, design(models.all_models()[kind], layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_does_so_in_every_layout(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, design(models.all_models()[kind], layout, z_loss=1e-3))


THIN = (
    LAYOUTS[0],
    Layout(replicate=2, tensor=2, recompute=Recompute.SELECTIVE, batch=4),
    Layout(context=2, tensor=2, sharding=Sharding.OPTIMIZER, batch=4),
    Layout(pipeline=2, tensor=2, sequence_parallel=True, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4),
)


@pytest.mark.parametrize("layout", THIN, ids=str)
def test_thin_matrices_give_what_one_device_gives(pool: Pool, layout: Layout) -> None:
    """With biases after both kinds of product; drawn plans have thin matrices of every kind of block."""
    check(pool, design(models.factored(models.gpt()), layout, z_loss=1e-3), packed=Documents.TWO)


ORDERS = (
    (AxisName.SHARD, AxisName.PIPELINE, AxisName.TENSOR),
    (AxisName.SHARD, AxisName.TENSOR, AxisName.PIPELINE),
    (AxisName.REPLICATE, AxisName.PIPELINE, AxisName.SHARD),
)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
def test_a_pipeline_inside_other_axes_gives_what_one_device_gives(pool: Pool, order: tuple[AxisName, ...]) -> None:
    """Every order that the runtime lays: the pipeline anywhere."""
    sizes = {name.value: 2 for name in order}
    sharding = Sharding.PARAMETERS if AxisName.TENSOR in order else Sharding.OPTIMIZER
    entry = design(MODEL, Layout(**sizes, sharding=sharding, batch=BATCH))
    axes = tuple(Axis(name=name, size=2) for name in order)
    check(pool, replace(entry, plan=replace(entry.plan, axes=axes)))
