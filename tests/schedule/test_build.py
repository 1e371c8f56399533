"""Every table that build gives is legal, in the papers' order, with the papers' bubble and memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Work, bubble_fraction, build, check, in_flight, problems, stage_rank, to_csv
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import ScheduleKind
from tests.schedule.simulate import idle_share

ONE_CHUNK = st.sampled_from([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
SIZES = st.integers(min_value=1, max_value=8)


@settings(deadline=None, max_examples=60)
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


@settings(deadline=None, max_examples=60)
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


def test_schedules_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"6 microbatches are not a multiple of 4 pipeline ranks.*4 or 8"):
        build(ScheduleKind.INTERLEAVED, pipeline=4, chunks=2, microbatches=6)
    with pytest.raises(ConfigError, match="1f1b runs one stage on each rank, not 2"):
        build(ScheduleKind.ONE_F_ONE_B, pipeline=4, chunks=2, microbatches=8)
    assert len(problems(ScheduleKind.GPIPE, pipeline=0, chunks=0, microbatches=0)) == 3
    assert problems(ScheduleKind.INTERLEAVED, pipeline=4, chunks=2, microbatches=8) == ()
    with pytest.raises(ConfigError):
        bubble_fraction(ScheduleKind.INTERLEAVED, pipeline=4, chunks=2, microbatches=6)
