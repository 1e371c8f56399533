"""What the timekeeper writes of events, and reads of what is half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.spec.goodput import Moment, Spent
from meshwright.train.events import Ending, Evaluate, Log, RollBack, Save, Started, StepDone, StepSpoilt, Stopping
from meshwright.train.observe.timekeeper import Timekeeper, goodput_of, marks_of, note_launch, path_of


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(keeper: Timekeeper, clock: Clock, number: int, *, seconds: float = 1.0, waited: float = 0.0) -> None:
    clock.now += seconds
    done = StepDone(
        step=number, tokens=number, loss=1.0, grad_norm=1.0, learning_rate=1.0, seconds=seconds, memory_bytes=0.0,
        input_seconds=waited,
    )  # fmt: skip
    keeper.see(done)


def test_every_second_between_events_is_of_what_the_run_did(tmp_path: Path, clock: Clock) -> None:
    note_launch(tmp_path, plan="a", began=990.0)
    note_launch(tmp_path, plan="a", began=995.0)
    keeper = Timekeeper(tmp_path, clock=clock)
    clock.now += 4.0
    keeper.see(Started(step=0, total_steps=20))
    for number in range(1, 9):
        step(keeper, clock, number, seconds=6.0 if number == 1 else 1.0, waited=0.25)
    keeper.did(Log(), step=8)
    clock.now += 0.5
    keeper.did(Evaluate(), step=8)
    clock.now += 0.75
    keeper.did(Save(), step=8)
    for number in range(9, 12):
        step(keeper, clock, number)
    live = keeper.ettr
    clock.now += 1.5
    keeper.see(StepSpoilt(step=12, loss=float("nan"), grad_norm=1.0, num_targets=1, state_finite=True))
    clock.now += 2.0
    keeper.did(RollBack(), step=8)
    step(keeper, clock, 9)
    keeper.see(Stopping(step=9, ending=Ending.FINISHED))
    clock.now += 0.125
    keeper.end(asked=True)

    found = goodput_of(tmp_path)
    assert found is not None
    assert found.wall_seconds == clock.now - 990.0
    assert {kind: each for kind, each in found.seconds.items() if each} == pytest.approx({
        Spent.START: 14.0, Spent.USEFUL: 7.0, Spent.DATA: 2.0, Spent.SLOW: 5.0, Spent.EVALUATION: 0.5,
        Spent.CHECKPOINT: 0.75, Spent.UNDONE: 3.0, Spent.SPOILT: 1.5, Spent.RESTART: 2.0, Spent.END: 0.125,
    })  # fmt: skip
    assert live == pytest.approx(9.0 / (14.0 + 13.0 + 0.5 + 0.75 + 3.0))
    assert keeper.summary["wall_seconds"] == found.wall_seconds
    assert keeper.summary["ettr"] == found.ettr
    assert len(path_of(tmp_path).read_text().splitlines()) < 15


def test_steps_are_kept_within_seconds_and_another_process_adds_to_them(tmp_path: Path, clock: Clock) -> None:
    note_launch(tmp_path, plan="a", began=999.0)
    keeper = Timekeeper(tmp_path, clock=clock)
    keeper.see(Started(step=0, total_steps=20))
    for number in range(1, 30):
        step(keeper, clock, number, seconds=0.5)
    assert marks_of(tmp_path)[-1].step >= 26, "a kill would lose more than two seconds"
    with path_of(tmp_path).open("a") as file:
        file.write('{"what": "steps", "at": 10')
    again = Timekeeper(tmp_path, clock=clock)
    clock.now += 5.0
    again.end(why="lost")
    (*_, last) = marks_of(tmp_path)
    assert (last.what, last.why) == (Moment.ENDED, "lost"), "a line that was cut off takes no other with it"


def test_a_launch_is_marked_with_how_far_the_metrics_had_come(tmp_path: Path) -> None:
    """After a roll-back that is not the furthest step; evaluations and a line that is cut off are none."""
    lines = ['{"step": 9, "loss": 1.0}', '{"step": 7, "loss": 1.0}', '{"step": 8, "validation_loss": 1}']
    lines.append('{"step": 8, "loss"')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    note_launch(tmp_path, plan="a", began=990.0)
    assert [mark.step for mark in marks_of(tmp_path)] == [7]


def test_a_directory_that_takes_no_file_is_no_reason_to_stop(tmp_path: Path, clock: Clock) -> None:
    keeper = Timekeeper(tmp_path / "gone", clock=clock)
    keeper.see(Started(step=0, total_steps=20))
    step(keeper, clock, 1)
    assert keeper.ettr == 1.0
    assert goodput_of(tmp_path / "gone") is None
