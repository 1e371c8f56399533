"""What the time of a run went to, in lines and on the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.report import goodput_lines, read_run
from meshwright.report.page import render
from meshwright.report.time_spent import goodput_figure
from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.spec.goodput import Goodput, Interruption, Mark, Moment, Spent, account
from meshwright.spec.units import format_seconds
from meshwright.train.observe.timekeeper import first_line, note

MARKS = (
    Mark(what=Moment.LAUNCHED, at=0.0),
    Mark(what=Moment.STARTED, at=60.0),
    Mark(what=Moment.STEPS, at=3660.0, first=1, step=360, data_seconds=36.0),
    Mark(what=Moment.SAVED, at=3672.0, step=360),
    Mark(what=Moment.STEPS, at=4272.0, first=361, step=420),
    Mark(what=Moment.ENDED, at=4302.0, step=420, why="rank 1 was killed <signal 9>"),
    Mark(what=Moment.LAUNCHED, at=4602.0),
    Mark(what=Moment.STARTED, at=4650.0, step=360),
    Mark(what=Moment.STEPS, at=8250.0, first=361, step=720),
)
LOST = (
    "16 min 18 s lost, on from step 360: rank 1 was killed <signal 9>; undone steps 10 min 0 s (60), failing 30.0 s, "
    "down 5 min 0 s, restarts 48.0 s"
)


def goodput() -> Goodput:
    found = account(MARKS)
    assert found is not None
    return found


def test_lines_say_the_useful_share_and_what_each_fault_cost() -> None:
    first, second = goodput_lines(goodput())
    assert first.startswith("time: 86.8 % of 2 h 18 min was useful (ETTR); undone steps 10 min 0 s, down 5 min 0 s, ")
    assert second == f"  {LOST}"
    small = Interruption(step=1, why="a test", undone_steps=0, seconds={Spent.RESTART: 1.0})
    many = replace(goodput(), interruptions=(*goodput().interruptions, *[small] * 6))
    assert goodput_lines(many)[-1] == "  2 more interruptions: 2.00 s lost"


@pytest.mark.parametrize(("done", "why"), [(False, "asked to stop"), (True, "had done the steps")])
def test_an_end_that_was_asked_for_is_not_called_lost_and_what_came_after_it_is_told_apart(
    *, done: bool, why: str
) -> None:
    marks = [replace(mark, asked=True, done=done, why="") if mark.what is Moment.ENDED else mark for mark in MARKS]
    marks[7] = replace(marks[7], step=420)
    marks[8] = replace(marks[8], first=421)
    found = account(marks)
    assert found is not None
    first, second = goodput_lines(found)
    assert first.endswith("; and 5 min 0 s asleep beside them")
    assert f"of {format_seconds(found.held_seconds)} was useful" in first
    assert second.startswith("  48.0 s to go on from step 420: it ")
    assert why in second
    figure = goodput_figure(found)
    assert figure is not None
    assert "48.0 s to go on" in figure.body


def test_the_page_of_a_run_has_its_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Where the run&#39;s time went" not in render([read_run(run_dir)])
    for mark in MARKS:
        note(run_dir, mark)
    files = read_run(run_dir)
    assert files.goodput == goodput()
    text = render([files])
    assert "Where the run&#39;s time went" in text
    assert "rank 1 was killed &lt;signal 9&gt;" in text
    assert main(["report", str(run_dir)]) == 0
    assert LOST in capsys.readouterr().out
    assert main(["report", str(run_dir), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["goodput"]
    assert told["seconds"]["undone steps"] == 600.0
    assert told["ettr"] == goodput().ettr


def test_the_bar_of_a_run_is_its_whole_time() -> None:
    figure = goodput_figure(goodput())
    assert figure is not None
    assert [name for _, name in figure.legend] == [row[0] for row in figure.table.rows]
    assert goodput_figure(None) is None


def test_what_is_kept_of_an_error_is_what_happened_in_whole_words() -> None:
    """Not its reason and what to do, which the run has said, and never half a bracket."""
    problem = Problem(what="rank 1 was killed (signal 9)", why="memory is not the likely cause", fix="see the log")
    assert first_line(WorkerFailed(problem)) == "rank 1 was killed (signal 9)"
    long = first_line(ValueError("word " * 100))
    assert len(long) <= 200
    assert long.endswith("word ...")
