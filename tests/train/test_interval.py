"""How often a run saves by itself: chosen from what is predicted, chosen again from what is measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import cost
from meshwright.spec.errors import ConfigError
from meshwright.spec.goodput import Goodput, Spent
from meshwright.train.events import Action, Ending, Log, Save, Saved, Started, StepDone, Stopping
from meshwright.train.interval import MEASURING_STEPS, SaveCosts, SaveForGoodput, predicted_costs, with_failures
from tests.run.runs import design, failing

HOUR = 3600.0
COSTS = SaveCosts(
    step_seconds=2.0, stall_seconds=4.0, write_seconds=30.0, restart_seconds=600.0, seconds_between_failures=8 * HOUR
)


def done(step: int) -> StepDone:
    return StepDone(
        step=step, tokens=step, loss=1.0, grad_norm=1.0, learning_rate=1.0, seconds=2.0, memory_bytes=0.0
    )  # fmt: skip


def text(actions: object) -> str:
    (told,) = actions  # type: ignore[misc]  # one action
    assert isinstance(told, Log)
    return told.text


def test_the_interval_is_the_one_that_loses_least() -> None:
    young = math.sqrt(2.0 * 4.0 * 8 * HOUR)
    assert COSTS.steps * 2.0 == pytest.approx(young, rel=0.02)
    assert replace(COSTS, stall_seconds=16.0).steps == pytest.approx(2 * COSTS.steps, rel=0.03)
    assert replace(COSTS, seconds_between_failures=2 * HOUR).steps == pytest.approx(COSTS.steps / 2, rel=0.03)
    assert replace(COSTS, stall_seconds=1e-6).steps * 2.0 >= COSTS.write_seconds, "one is written before the next"
    assert replace(COSTS, step_seconds=1e6).steps == 1


def test_the_first_save_is_early_and_what_it_took_decides_the_next() -> None:
    policy = SaveForGoodput(costs=COSTS)
    assert text(policy.react(Started(step=100, total_steps=9999))) == (
        "a checkpoint every 239 steps: saves stall 4.00 s as predicted, one failure in 8 h 0 min is expected"
    )
    answers: dict[int, tuple[Action, ...]] = {step: tuple(policy.react(done(step))) for step in range(101, 121)}
    assert {step for step, each in answers.items() if each} == {100 + MEASURING_STEPS}
    told = text(policy.react(Saved(step=120, seconds=1.0, step_seconds=0.5)))
    assert told == (
        "a checkpoint every 479 steps: saves stall 1.00 s as measured, one failure in 8 h 0 min is expected"
    )
    assert not any(policy.react(done(step)) for step in range(121, 120 + policy.every))
    assert policy.react(done(120 + policy.every)) == (Save(),)
    assert policy.react(Saved(step=120 + policy.every, seconds=1.0, step_seconds=0.5)) == (), "nothing new is not told"
    assert policy.react(Stopping(step=120 + policy.every, ending=Ending.FINISHED)) == ()
    assert policy.react(Stopping(step=121 + policy.every, ending=Ending.SIGNALLED)) == (Save(),)


def test_a_save_that_takes_longer_to_write_than_was_thought_is_waited_for() -> None:
    policy = SaveForGoodput(costs=COSTS)
    policy.react(Started(step=0, total_steps=9999))
    policy.react(Saved(step=20, seconds=0.01, write_seconds=900.0, step_seconds=2.0))
    assert policy.every == 450


def test_where_steps_are_few_between_saves_the_first_is_not_later() -> None:
    policy = SaveForGoodput(costs=replace(COSTS, seconds_between_failures=60.0, stall_seconds=0.1, write_seconds=0.2))
    policy.react(Started(step=0, total_steps=9999))
    assert policy.due == policy.every < MEASURING_STEPS


def test_failures_of_the_run_itself_count_with_what_is_said_of_its_devices() -> None:
    past = Goodput(
        wall_seconds=10 * HOUR, ettr=0.5, steps=9, launches=4, failures=3, seconds={Spent.ASLEEP: 2 * HOUR}
    )  # fmt: skip
    assert with_failures(COSTS, past=None) == COSTS
    assert with_failures(COSTS, past=past).seconds_between_failures == pytest.approx((8 + 8) * HOUR / 4)


def test_devices_of_which_nobody_says_how_often_they_fail_are_refused(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    with pytest.raises(ConfigError, match=r"how often these devices fail is not known.*hours_between_failures"):
        predicted_costs(cost.predict(made))
    known = cost.predict(replace(made, cluster=failing(made.cluster, hours=10.0)))
    assert predicted_costs(known).seconds_between_failures == pytest.approx(10 * HOUR)
