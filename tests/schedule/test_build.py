"""Every table that build gives is legal, in the papers' order, with the papers' bubble and memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import (
    NAMED,
    Table,
    Work,
    bubble_fraction,
    build,
    check,
    in_flight,
    placement,
    problems,
    stage_rank,
    to_csv,
)
from meshwright.schedule.build import LOOPS, SLICED, SPLIT, V_SHAPES
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import ScheduleKind
from tests.schedule.simulate import idle_share

ONE_CHUNK = st.sampled_from([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
SIZES = st.integers(min_value=1, max_value=8)


@settings(max_examples=60)
@given(kind=ONE_CHUNK, pipeline=SIZES, microbatches=st.integers(1, 20))
def test_one_stage_a_rank_is_legal_with_the_papers_bubble(kind: ScheduleKind, pipeline: int, microbatches: int) -> None:
    shape = {"pipeline": pipeline, "chunks": 1, "microbatches": microbatches}
    table = build(kind, **shape)
    assert check(table, stages=pipeline) == ()
    expected = (pipeline - 1) / (microbatches + pipeline - 1)
    assert bubble_fraction(kind, **shape) == pytest.approx(expected)
    assert idle_share(table, stages=pipeline) == pytest.approx(expected)
    most = [min(pipeline - rank, microbatches) for rank in range(pipeline)]
    assert list(in_flight(table)) == ([microbatches] * pipeline if kind is ScheduleKind.GPIPE else most)


@settings(max_examples=60)
@given(pipeline=SIZES, chunks=st.integers(1, 4), groups=st.integers(1, 4))
def test_interleaved_is_legal_with_the_papers_bubble_and_warm_up(pipeline: int, chunks: int, groups: int) -> None:
    microbatches = pipeline * groups
    shape = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches}
    table = build(ScheduleKind.INTERLEAVED, **shape)
    stages = pipeline * chunks
    assert check(table, stages=stages) == ()
    expected = (pipeline - 1) / (chunks * microbatches + pipeline - 1)
    assert bubble_fraction(ScheduleKind.INTERLEAVED, **shape) == pytest.approx(expected)
    assert idle_share(table, stages=stages) == pytest.approx(expected)
    for rank, row in enumerate(table):
        first = next(index for index, action in enumerate(row) if action.work is Work.BACKWARD)
        warm_up = min(2 * (pipeline - rank - 1) + (chunks - 1) * pipeline, chunks * microbatches)
        assert first == min(warm_up + 1, chunks * microbatches)
        assert in_flight(table)[rank] == first
        places = {stage_rank(ScheduleKind.INTERLEAVED, a.stage, pipeline=pipeline, chunks=chunks) for a in row}
        assert places == {rank}


def test_the_order_of_a_small_interleaved_table_is_the_papers() -> None:
    table = build(ScheduleKind.INTERLEAVED, pipeline=2, chunks=2, microbatches=4)
    assert to_csv(table).splitlines() == [
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3",
    ]


def tokens_of(table: Table) -> list[str]:
    return [" ".join(map(str, row)) for row in table]


@settings(max_examples=120)
@given(
    kind=st.sampled_from(sorted(NAMED)),
    pipeline=SIZES,
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 20),
    slices=st.integers(1, 4),
)
def test_every_schedule_is_legal_with_the_bubble_it_tells_and_the_memory_its_ranks_hold(
    kind: ScheduleKind, pipeline: int, chunks: int, microbatches: int, slices: int
) -> None:
    shape = {
        "pipeline": pipeline,
        "chunks": 2 if kind in V_SHAPES else chunks if kind in LOOPS else 1,
        "microbatches": -(-microbatches // pipeline) * pipeline if kind is ScheduleKind.INTERLEAVED else microbatches,
        "slices": slices if kind in SLICED else 1,
    }
    if kind is ScheduleKind.DUAL_PIPE_V:
        shape["microbatches"] += 2 * pipeline
    assert problems(kind, **shape) == ()
    table, stages = build(kind, **shape), pipeline * shape["chunks"]
    places = placement(kind, pipeline=pipeline, chunks=shape["chunks"])
    assert check(table, stages=stages, placement=places) == ()
    assert {action.slice for row in table for action in row} == set(range(shape["slices"]))
    idle = idle_share(table, stages=stages, slices=shape["slices"])
    assert bubble_fraction(kind, **shape) == pytest.approx(idle, abs=1e-12)
    assert any(action.work is Work.WEIGHT for row in table for action in row) == (kind in SPLIT)


@settings(max_examples=40)
@given(pipeline=SIZES, rounds=st.integers(2, 4), slices=st.integers(1, 4))
def test_ranks_hold_what_the_papers_say(pipeline: int, rounds: int, slices: int) -> None:
    microbatches = 2 * pipeline * rounds

    def most(kind: ScheduleKind, chunks: int = 1, slices: int = 1) -> list[int]:
        shape = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches, "slices": slices}
        return list(in_flight(build(kind, **shape)))

    assert most(ScheduleKind.BREADTH_FIRST, chunks=2) == [2 * microbatches] * pipeline
    assert most(ScheduleKind.ZERO_BUBBLE_H1) == [pipeline] * pipeline
    assert most(ScheduleKind.ZERO_BUBBLE_H2) == [2 * pipeline - 1] * pipeline
    assert most(ScheduleKind.ZERO_BUBBLE_V, chunks=2) == [2 * pipeline] * pipeline
    assert most(ScheduleKind.DUAL_PIPE_V, chunks=2) == [2 * pipeline + 1] * pipeline
    cut = [pipeline - rank - 1 + slices for rank in range(pipeline)]
    assert most(ScheduleKind.SEQUENCE_1F1B, slices=slices) == cut


def test_small_tables_are_those_of_the_papers() -> None:
    layered = build(ScheduleKind.BREADTH_FIRST, pipeline=1, chunks=3, microbatches=2)
    assert tokens_of(layered) == ["0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"]
    assert tokens_of(build(ScheduleKind.ZERO_BUBBLE_H1, pipeline=2, chunks=1, microbatches=3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert tokens_of(build(ScheduleKind.SEQUENCE_1F1B, pipeline=2, chunks=1, microbatches=2, slices=2)) == [
        "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1",
    ]
    assert tokens_of(build(ScheduleKind.ZERO_BUBBLE_V, pipeline=2, chunks=2, microbatches=3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert tokens_of(build(ScheduleKind.DUAL_PIPE_V, pipeline=2, chunks=2, microbatches=4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_the_middle_of_a_v_is_on_the_last_rank_and_both_ends_on_the_first() -> None:
    assert placement(ScheduleKind.ZERO_BUBBLE_V, pipeline=3, chunks=2) == (0, 1, 2, 2, 1, 0)
    assert placement(ScheduleKind.DUAL_PIPE_V, pipeline=3, chunks=2) == (0, 1, 2, 2, 1, 0)
    assert placement(ScheduleKind.INTERLEAVED, pipeline=3, chunks=2) == (0, 1, 2, 0, 1, 2)


def test_schedules_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"6 microbatches are not a multiple of 4 pipeline ranks.*4 or 8"):
        build(ScheduleKind.INTERLEAVED, pipeline=4, chunks=2, microbatches=6)
    with pytest.raises(ConfigError, match="1f1b runs one stage on each rank, not 2"):
        build(ScheduleKind.ONE_F_ONE_B, pipeline=4, chunks=2, microbatches=8)
    assert len(problems(ScheduleKind.GPIPE, pipeline=0, chunks=0, microbatches=0)) == 3
    with pytest.raises(ConfigError, match="zb-v runs two stages on each rank, not 3"):
        build(ScheduleKind.ZERO_BUBBLE_V, pipeline=4, chunks=3, microbatches=8)
    with pytest.raises(ConfigError, match=r"7 microbatches are fewer than two for each of 4.*8 microbatches or more"):
        build(ScheduleKind.DUAL_PIPE_V, pipeline=4, chunks=2, microbatches=7)
    with pytest.raises(ConfigError, match="1f1b does not cut microbatches into 2 slices"):
        build(ScheduleKind.ONE_F_ONE_B, pipeline=4, chunks=1, microbatches=8, slices=2)
    assert problems(ScheduleKind.INTERLEAVED, pipeline=4, chunks=2, microbatches=8) == ()
    with pytest.raises(ConfigError):
        bubble_fraction(ScheduleKind.INTERLEAVED, pipeline=4, chunks=2, microbatches=6)
