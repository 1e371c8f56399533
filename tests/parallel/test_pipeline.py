"""Every schedule, with and without data parallelism, gives one device's loss and gradients."""

from __future__ import annotations

import pytest

from meshwright import schedule
from meshwright.spec.plan import Plan, ScheduleKind, Sharding
from tests.parallel.pipeline_cases import BLOCKS, collectives, exchanged, failure, make_plan, parities
from tests.support.pool import Pool

END = BLOCKS + 2
FOUR = (0, 1, 4, 6, END)


def two_ranks(kind: ScheduleKind, bounds: tuple[int, ...], microbatches: int) -> Plan:
    return make_plan(kind, pipeline=2, bounds=bounds, microbatches=microbatches, sharding=Sharding.NONE, data=1)


def test_every_schedule_with_uneven_stages_is_one_device(pool: Pool) -> None:
    plans = (
        two_ranks(ScheduleKind.GPIPE, (0, 2, END), 3),
        two_ranks(ScheduleKind.ONE_F_ONE_B, (0, 6, END), 4),
        two_ranks(ScheduleKind.ONE_F_ONE_B, (0, 6, END), 1),
        two_ranks(ScheduleKind.INTERLEAVED, FOUR, 4),
    )
    for results in pool.run(parities, plans, ranks=2):
        for plan, result in zip(plans, results, strict=True):
            assert result["loss"] < 1e-12, plan.describe()
            assert result["gradients"] < 1e-12, plan.describe()


@pytest.mark.parametrize("kind", [ScheduleKind.INTERLEAVED, ScheduleKind.DUAL_PIPE_V])
def test_spans_are_the_actions_of_the_table_in_order(pool: Pool, kind: ScheduleKind) -> None:
    """Both halves of a split backward are told as backward, as the predicted timeline tells them."""
    plan = two_ranks(kind, FOUR, 4)
    table = schedule.build(kind, pipeline=2, chunks=2, microbatches=4)
    for row, (result,) in zip(table, pool.run(parities, (plan,), ranks=2), strict=True):
        passes = [span for span in result["spans"] if span[0] in ("forward", "backward")]
        assert passes == [("forward" if a.work == "F" else "backward", a.stage, a.microbatch) for a in row]


def test_pipeline_with_data_parallelism_of_every_kind_is_one_device(pool: Pool) -> None:
    plans = tuple(
        make_plan(kind, pipeline=2, bounds=bounds, microbatches=4, sharding=sharding, data=2)
        for kind, bounds in ((ScheduleKind.ONE_F_ONE_B, (0, 3, END)), (ScheduleKind.INTERLEAVED, FOUR))
        for sharding in Sharding
    )
    for results in pool.run(parities, plans, ranks=4):
        for plan, result in zip(plans, results, strict=True):
            assert result["loss"] < 1e-12, plan.describe()
            assert result["gradients"] < 1e-12, plan.describe()


def test_four_ranks_run_two_chunks_each_and_fewer_microbatches_than_stages(pool: Pool) -> None:
    plans = (
        make_plan(
            ScheduleKind.INTERLEAVED, pipeline=4, bounds=tuple(range(9)), microbatches=8, sharding=Sharding.NONE, data=1
        ),
        make_plan(ScheduleKind.ONE_F_ONE_B, pipeline=4, bounds=FOUR, microbatches=2, sharding=Sharding.NONE, data=1),
    )
    for results in pool.run(parities, plans, ranks=4):
        for plan, result in zip(plans, results, strict=True):
            assert result["loss"] < 1e-12, plan.describe()
            assert result["gradients"] < 1e-12, plan.describe()


def test_what_a_stage_raises_comes_out_as_it_was_raised(pool: Pool) -> None:
    for forward in (True, False):
        plan = two_ranks(ScheduleKind.ONE_F_ONE_B, (0, 6, END), 2)
        assert pool.run(failure, plan, forward, ranks=2, timeout=60)[1] == "ArithmeticError: no such number"
        pool.close()


def test_each_zero_stage_communicates_when_it_should(pool: Pool) -> None:
    """The second of two stages is one layer and the head: two sharded units, through four microbatches."""
    expected = {Sharding.OPTIMIZER: (2, 2), Sharding.GRADIENTS: (2, 8), Sharding.PARAMETERS: (16, 8)}
    for sharding, counts in expected.items():
        plan = make_plan(
            ScheduleKind.ONE_F_ONE_B, pipeline=2, bounds=(0, 6, END), microbatches=4, sharding=sharding, data=2
        )
        assert pool.run(collectives, plan, ranks=4)[-1] == counts, sharding


def test_split_backwards_reduce_when_the_matrices_gradients_are_formed(pool: Pool) -> None:
    """As above for zero bubble: ZeRO-1 once, ZeRO-2 and 3 once a microbatch, and not once more for the inputs' half."""
    expected = {Sharding.OPTIMIZER: (2, 2), Sharding.GRADIENTS: (2, 8), Sharding.PARAMETERS: (16, 8)}
    for sharding, counts in expected.items():
        plan = make_plan(
            ScheduleKind.ZERO_BUBBLE_H2, pipeline=2, bounds=(0, 6, END), microbatches=4, sharding=sharding, data=2
        )
        assert pool.run(collectives, plan, ranks=4)[-1] == counts, sharding


def test_breadth_first_gathers_a_stage_of_one_layer_once_each_way(pool: Pool) -> None:
    """Whatever the number of microbatches. The last rank holds three layers and the head: four sharded units."""
    for sharding, counts in {Sharding.GRADIENTS: (4, 4), Sharding.PARAMETERS: (8, 4)}.items():
        plan = make_plan(
            ScheduleKind.BREADTH_FIRST,
            pipeline=2,
            bounds=(0, 2, 3, 4, 5, 6, END),
            microbatches=4,
            sharding=sharding,
            data=2,
        )
        assert pool.run(collectives, plan, ranks=4)[-1] == counts, sharding


@pytest.mark.parametrize("elements", [5, 200_001])
def test_two_ranks_exchange_what_they_have(pool: Pool, elements: int) -> None:
    for rank, found in enumerate(pool.run(exchanged, elements, ranks=2)):
        assert found == [float(1 - rank), elements]
