"""Schedules made to measure are legal, keep their limit, beat the classic ones and come near the shortest there is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Work, check, placement
from meshwright.schedule.lower_bound import lower_bound
from meshwright.schedule.synthesize import synthesize
from meshwright.schedule.workload import Workload
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import ScheduleKind
from tests.schedule.exact import Exact

LOOP, V = ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE_V
SMALL = [
    (2, 1, LOOP, 5, 2.0),
    (2, 1, LOOP, 4, 1.0),
    (3, 1, LOOP, 4, 3.0),
    (3, 1, LOOP, 4, 2.0),
    (2, 2, V, 3, 2.0),
    (2, 2, V, 3, 1.5),
    (2, 2, LOOP, 3, 2.0),
    (2, 2, LOOP, 3, 1.5),
]


def workload(
    pipeline: int, chunks: int, kind: ScheduleKind, microbatches: int, limit: float, *, seed: int, spread: float = 0.4
) -> Workload:
    """Random stages; `limit` in microbatches of a rank."""
    generator, stages = random.Random(seed), pipeline * chunks

    def draw() -> tuple[float, ...]:
        return tuple(generator.uniform(1.0 - spread, 1.0 + spread) for _ in range(stages))

    return Workload(
        forward=draw(),
        input=draw(),
        weight=draw(),
        transfer=(0.3,) * stages,
        placement=placement(kind, pipeline=pipeline, chunks=chunks),
        microbatches=microbatches,
        activation_bytes=(1.0 / chunks,) * stages,
        limit_bytes=(limit,) * pipeline,
    )


@settings(max_examples=25)
@given(
    pipeline=st.integers(1, 4),
    chunks=st.integers(1, 2),
    kind=st.sampled_from([LOOP, V]),
    microbatches=st.integers(1, 6),
    limit=st.sampled_from([1.0, 1.5, 2.0, 4.0, math.inf]),
    seed=st.integers(0, 999),
)
def test_what_is_made_is_legal_keeps_its_limit_and_is_no_slower_than_any_classic_schedule(
    pipeline: int, chunks: int, kind: ScheduleKind, microbatches: int, limit: float, seed: int
) -> None:
    kind = kind if chunks == 2 else LOOP
    work = workload(pipeline, chunks, kind, microbatches, limit, seed=seed)
    made = synthesize(work, tries=80)
    table = made.program.table()
    assert check(table, stages=work.stages, placement=work.placement) == ()
    for row in table:
        held = 0.0
        for action in row:
            held += {Work.FORWARD: 1.0, Work.INPUT: 0.0}.get(action.work, -1.0) / chunks
            assert held <= limit + 1e-9
    assert made.bound <= made.seconds + 1e-9
    assert made.seconds <= made.classic + 1e-9
    assert (made.classic_kind is None) == (made.classic == math.inf)
    assert made.gap == pytest.approx(made.seconds / lower_bound(work) - 1.0)


@pytest.mark.parametrize(("pipeline", "chunks", "kind", "microbatches", "limit"), SMALL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_schedules_are_within_a_tenth_of_the_shortest(
    pipeline: int, chunks: int, kind: ScheduleKind, microbatches: int, limit: float, seed: int
) -> None:
    work = workload(pipeline, chunks, kind, microbatches, limit, seed=seed)
    made = synthesize(work, tries=600)
    found = Exact(work).shortest(below=made.seconds - 1e-9)
    shortest = made.seconds if found is None else found
    assert made.bound <= shortest + 1e-9
    assert made.seconds <= 1.1 * shortest


def test_the_exact_search_finds_what_can_be_counted_by_hand() -> None:
    even = workload(2, 1, LOOP, 2, math.inf, seed=0, spread=0.0)
    # Down, both microbatches' passes on the last rank, up, and the two halves of the second on the first.
    assert Exact(even).shortest(below=100.0) == pytest.approx(1.0 + 0.3 + 4.0 + 0.3 + 2.0)
    assert lower_bound(even) == pytest.approx(7.6)
    alone = workload(2, 1, LOOP, 2, 1.0, seed=0, spread=0.0)
    assert Exact(alone).shortest(below=100.0) == pytest.approx(2 * (1.0 + 0.3 + 2.0 + 0.3 + 2.0))


def test_equal_stages_with_room_need_no_more_than_the_bound() -> None:
    made = synthesize(workload(4, 1, LOOP, 8, 4.0, seed=0, spread=0.0), tries=50)
    assert made.gap == pytest.approx(0.0, abs=1e-9)
    assert made.classic_kind is ScheduleKind.ZERO_BUBBLE_H1


def test_the_same_seed_gives_the_same_schedule() -> None:
    work = workload(3, 1, LOOP, 6, 2.0, seed=4)
    assert synthesize(work, tries=200, seed=1).program.table() == synthesize(work, tries=200, seed=1).program.table()


def test_a_microbatch_that_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one microbatch leaves 1 bytes and 0.5 are allowed"):
        workload(2, 2, V, 3, 0.5, seed=0)
    with pytest.raises(ConfigError, match="1 values for 2 stages"):
        Workload(
            forward=(1.0,),
            input=(1.0, 1.0),
            weight=(1.0, 1.0),
            transfer=(0.0, 0.0),
            placement=(0, 1),
            microbatches=2,
            activation_bytes=(1.0, 1.0),
            limit_bytes=(2.0, 2.0),
        )


def test_limits_that_no_try_keeps_are_told() -> None:
    """Without tries only classic schedules are looked at, and none of two chunks a rank holds so little."""
    work = workload(2, 2, LOOP, 3, 1.0, seed=1)
    with pytest.raises(ConfigError, match="no schedule of 0 tries keeps the limits"):
        synthesize(work, tries=0)


def test_a_search_ends_as_near_to_the_bound_as_is_asked() -> None:
    work = workload(4, 1, LOOP, 8, 6.0, seed=3)
    loose, tight = (synthesize(work, tries=300, close=close) for close in (0.5, 1e-9))
    assert loose.gap <= 0.5
    assert tight.seconds < loose.seconds == loose.classic
