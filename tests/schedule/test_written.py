"""Tables as plans carry them: what is written is read back, and is as short as the schedule is regular."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import NAMED, Table, Work, build, check, placement, planned, program, written
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Schedule, ScheduleKind

WHOLE = [kind for kind in NAMED if kind is not ScheduleKind.SEQUENCE_1F1B]


def made(kind: ScheduleKind, *, pipeline: int, microbatches: int) -> tuple[Table, int]:
    chunks = 2 if kind in LOOPS | V_SHAPES else 1
    return build(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches), chunks


@pytest.mark.parametrize("kind", WHOLE)
def test_every_schedule_is_written_and_read_back(kind: ScheduleKind) -> None:
    table, chunks = made(kind, pipeline=4, microbatches=16)
    entry = planned.of(table, chunks=chunks)
    assert planned.table(entry, pipeline=4) == table
    assert planned.placement(entry, pipeline=4) == placement(kind, pipeline=4, chunks=chunks)
    assert planned.splits(entry) == planned.splits(Schedule(kind=kind))
    assert entry.microbatches == 16


def test_a_long_regular_schedule_is_written_short() -> None:
    table, _ = made(ScheduleKind.ZERO_BUBBLE_H1, pipeline=4, microbatches=4096)
    rows = written.write(table)
    assert rows[0] == "0F*4 (0I 0W 0F)*4092 (0I 0W)*4"
    assert max(map(len, rows)) < 50
    assert written.read(rows) == table


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from(["0F", "0B", "3I", "3W", "12F"]), min_size=1, max_size=40))
def test_any_row_of_passes_is_read_as_it_is_written(words: list[str]) -> None:
    (row,) = written.read([" ".join(words)])
    assert [f"{action.stage}{action.work.value}" for action in row] == words
    assert written.read(written.write((row,))) == (row,)


def test_runs_may_hold_runs() -> None:
    (row,) = written.read(["((0F 0B*2)*2 0F)*2"])
    assert "".join(action.work.value for action in row) == 2 * "FBBFBBF"


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("count", [1, 5])
def test_the_first_microbatches_of_a_table_are_a_schedule(kind: ScheduleKind, count: int) -> None:
    table, chunks = made(kind, pipeline=3, microbatches=9)
    first = planned.of_first(planned.of(table, chunks=chunks), count)
    assert planned.problems(first, pipeline=3) == ()
    assert first.microbatches == count


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("count", [2, 4, 9])
def test_the_outer_microbatches_of_a_table_are_a_schedule(kind: ScheduleKind, count: int) -> None:
    """Which ends as the whole does: the last passes are those of the last microbatches."""
    table, chunks = made(kind, pipeline=3, microbatches=9)
    outer = planned.of_outer(planned.of(table, chunks=chunks), count)
    assert planned.problems(outer, pipeline=3) == ()
    assert outer.microbatches == count
    works = [[(action.work, action.stage) for action in row][-1] for row in planned.table(outer, pipeline=3)]
    assert works == [[(action.work, action.stage) for action in row][-1] for row in table]


def test_a_table_knows_no_more_microbatches_than_it_has() -> None:
    table, _ = made(ScheduleKind.ONE_F_ONE_B, pipeline=2, microbatches=4)
    with pytest.raises(ConfigError, match="stage 0: 4 F and 4 B for 6 microbatches"):
        planned.program(planned.of_first(planned.of(table, chunks=1), 6), pipeline=2)


def test_more_stages_than_passes_are_told_and_not_counted_out() -> None:
    with pytest.raises(ConfigError, match="8 passes for 2,000,000,000 stages"):
        written.legal(["0F*2 0B*2", "1F*2 1B*2"], pipeline=2, chunks=10**9, microbatches=2)


def test_microbatches_out_of_order_are_taken_in_order() -> None:
    """They are alike: a table that a search has shuffled is written without their names, and stays legal."""
    table, _ = made(ScheduleKind.GPIPE, pipeline=2, microbatches=4)
    turned = tuple(
        (
            *reversed([each for each in row if each.work is Work.FORWARD]),
            *(each for each in row if each.work is not Work.FORWARD),
        )
        for row in table
    )
    assert planned.table(planned.of(turned, chunks=1), pipeline=2) == table


@pytest.mark.parametrize("kind", WHOLE)
def test_backwards_are_halved_and_made_whole(kind: ScheduleKind) -> None:
    chunks = 2 if kind in LOOPS | V_SHAPES else 1
    found = program(kind, pipeline=3, chunks=chunks, microbatches=6)
    places = placement(kind, pipeline=3, chunks=chunks)
    for changed, works in (
        (found.whole(), {Work.FORWARD, Work.BACKWARD}),
        (found.halved(), set(Work) - {Work.BACKWARD}),
    ):
        table = changed.table()
        assert check(table, stages=3 * chunks, placement=places) == ()
        assert {action.work for row in table for action in row} == works
