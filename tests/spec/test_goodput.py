"""What the time of a run went to, added up from its marks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.report.time_spent import interruption_line
from meshwright.spec.goodput import UNTOLD, Goodput, Mark, Moment, Spent, account

LAUNCH = Mark(what=Moment.LAUNCHED, at=100.0, plan="a")
START = Mark(what=Moment.STARTED, at=105.0)
STEPS = Mark(what=Moment.STEPS, at=115.0, first=1, step=10, data_seconds=1.0, slow_seconds=2.0)
SAVE = Mark(what=Moment.SAVED, at=116.0, step=10)
MORE = Mark(what=Moment.STEPS, at=126.0, first=11, step=20)
LOST = Mark(what=Moment.ENDED, at=129.0, step=20, why="rank 1 was killed")
AGAIN = Mark(what=Moment.LAUNCHED, at=139.0, plan="a")
BACK = Mark(what=Moment.STARTED, at=143.0, step=10)
LAST = Mark(what=Moment.STEPS, at=153.0, first=11, step=20)
DONE = Mark(what=Moment.ENDED, at=154.0, step=20, asked=True)


def added(*marks: Mark) -> Goodput:
    found = account(marks)
    assert found is not None
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds, abs=1e-9)
    assert all(each >= 0 for each in found.seconds.values())
    return found


def spent(found: Goodput) -> dict[Spent, float]:
    return {kind: each for kind, each in found.seconds.items() if each}


def test_a_run_of_one_launch() -> None:
    found = added(LAUNCH, START, STEPS, SAVE, replace(DONE, at=118.0))
    assert spent(found) == {
        Spent.USEFUL: 7.0, Spent.DATA: 1.0, Spent.SLOW: 2.0, Spent.CHECKPOINT: 1.0, Spent.START: 5.0, Spent.END: 2.0,
    }  # fmt: skip
    assert (found.steps, found.launches, found.failures, found.interruptions) == (10, 1, 0, ())
    assert found.ettr == pytest.approx(7.0 / 18.0)
    assert account([]) is None


def test_a_killed_run_loses_the_steps_after_its_checkpoint_and_the_way_back() -> None:
    found = added(LAUNCH, START, STEPS, SAVE, MORE, LOST, AGAIN, BACK, LAST, DONE)
    assert found.seconds[Spent.USEFUL] == 17.0
    (one,) = found.interruptions
    assert (one.step, one.why, one.undone_steps) == (10, "rank 1 was killed", 10)
    assert one.seconds == {Spent.UNDONE: 10.0, Spent.FAILING: 3.0, Spent.DOWN: 10.0, Spent.RESTART: 4.0}
    assert one.lost_seconds == 27.0
    assert (found.steps, found.launches, found.failures) == (20, 2, 1)
    assert found.ettr == pytest.approx(17.0 / 54.0)


def test_steps_that_no_mark_tells_of_are_undone_too() -> None:
    """Rank 0 was killed in step 25; what it took since its last mark counts as failing."""
    found = added(LAUNCH, START, STEPS, SAVE, MORE, LOST, replace(AGAIN, step=24), BACK, LAST, DONE)
    (one,) = found.interruptions
    assert (one.undone_steps, one.seconds[Spent.UNDONE], one.seconds[Spent.FAILING]) == (14, 10.0, 3.0)
    unmarked = added(LAUNCH, START, STEPS, SAVE, LOST, replace(AGAIN, step=14), BACK, LAST, DONE)
    assert unmarked.interruptions[0].undone_steps == 4
    assert "undone steps (4), failing" in interruption_line(unmarked.interruptions[0])
    saved = added(LAUNCH, START, STEPS, SAVE, replace(DONE, at=117.0), replace(AGAIN, step=10), BACK, LAST)
    assert saved.interruptions[0].undone_steps == 0


def test_two_that_tell_of_one_failure_are_one() -> None:
    lost = replace(LOST, at=127.0, why="connection closed by peer")
    found = added(LAUNCH, START, STEPS, SAVE, MORE, lost, LOST, AGAIN, BACK)
    assert (found.failures, found.interruptions[0].why, found.seconds[Spent.FAILING]) == (1, LOST.why, 3.0)


def test_a_run_that_was_asked_to_stop_sleeps_and_loses_its_restart_alone() -> None:
    found = added(LAUNCH, START, STEPS, SAVE, replace(DONE, at=117.0), AGAIN, BACK, LAST)
    assert spent(found)[Spent.ASLEEP] == 22.0
    assert found.interruptions[0].seconds == {Spent.RESTART: 4.0}
    assert found.interruptions[0].why == "it was asked to stop"
    assert found.failures == 0
    assert found.ettr == pytest.approx(17.0 / (53.0 - 22.0))


def test_a_run_that_had_done_its_steps_and_goes_on_was_not_asked_to_stop() -> None:
    found = added(LAUNCH, START, STEPS, SAVE, replace(DONE, at=117.0, done=True), AGAIN, BACK, LAST)
    assert found.interruptions[0].why == "it had done the steps it was asked for"
    assert found.failures == 0


def test_a_run_that_ended_without_a_word_was_down_since() -> None:
    found = added(LAUNCH, START, STEPS, SAVE, MORE, AGAIN, BACK, LAST)
    assert found.interruptions[0].why == UNTOLD
    assert found.interruptions[0].seconds[Spent.DOWN] == 13.0
    assert found.failures == 1


def test_another_plan_is_told_from_a_restart_and_a_launch_that_fails_is_in_the_cost() -> None:
    failed = Mark(what=Moment.ENDED, at=142.0, why="no memory")
    third = Mark(what=Moment.LAUNCHED, at=150.0, plan="b")
    begun = replace(BACK, at=157.0)
    found = added(LAUNCH, START, STEPS, SAVE, LOST, replace(AGAIN, plan="b"), failed, third, begun)
    (one,) = found.interruptions
    assert one.why == "no memory"
    assert one.seconds == {Spent.FAILING: 16.0, Spent.DOWN: 18.0, Spent.REPLAN: 7.0}
    assert (found.launches, found.failures) == (3, 2)


def test_a_roll_back_costs_its_steps_the_one_that_was_spoilt_and_the_load() -> None:
    spoilt = Mark(what=Moment.SPOILT, at=127.5, step=20)
    back = Mark(what=Moment.ROLLED_BACK, at=128.0, step=13)
    after = Mark(what=Moment.STEPS, at=135.0, first=14, step=20)
    found = added(LAUNCH, START, STEPS, SAVE, MORE, spoilt, back, after)
    (one,) = found.interruptions
    assert (one.step, one.undone_steps) == (13, 7)
    assert one.seconds == {Spent.UNDONE: 7.0, Spent.SPOILT: 1.5, Spent.RESTART: 0.5}
    assert found.steps == 20
    skipped = added(LAUNCH, START, STEPS, SAVE, MORE, spoilt, replace(after, first=21))
    assert skipped.interruptions == ()
    assert skipped.seconds[Spent.SPOILT] == 1.5


def test_a_clock_that_goes_back_adds_nothing() -> None:
    found = added(LAUNCH, START, STEPS, replace(SAVE, at=90.0), replace(DONE, at=120.0))
    assert found.wall_seconds == 20.0
    assert found.seconds[Spent.CHECKPOINT] == 0.0
