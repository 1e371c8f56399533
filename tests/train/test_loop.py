"""The loop and its policies over a run that trains nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from meshwright.spec.errors import WorkerFailed
from meshwright.train.events import (
    Action,
    Ending,
    Evaluate,
    Evaluated,
    Event,
    Log,
    Reactor,
    Save,
    Saved,
    Started,
    StepDone,
    Stopping,
)
from meshwright.train.loop import fit
from meshwright.train.policies import EndAt, EvaluateEvery, FiniteLoss, SaveEvery


@dataclass
class Pretend:
    """A run of steps whose losses are given; keeps what was done, in order."""

    reactors: tuple[Reactor, ...]
    at: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    stop_at: int | None = None
    done: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def start(self) -> Started:
        return Started(step=self.at, total_steps=99)

    def step(self) -> StepDone:
        self.at += 1
        self.done.append(f"step {self.at}")
        return StepDone(
            step=self.at,
            tokens=self.at * 10,
            loss=self.losses.get(self.at, 1.0),
            grad_norm=1.0,
            learning_rate=0.1,
            seconds=0.5,
            memory_bytes=0.0,
            stop_asked=self.at == self.stop_at,
        )

    def react(self, event: Event) -> Iterable[Action]:
        self.events.append(event)
        return [action for reactor in self.reactors for action in reactor.react(event)]

    def perform(self, action: Action) -> Event | None:
        if isinstance(action, Evaluate):
            self.done.append(f"evaluate {self.at}")
            return Evaluated(step=self.at, tokens=0, loss=1.0, bits_per_byte=1.0, num_sequences=1, seconds=0.0)
        if isinstance(action, Save):
            self.done.append(f"save {self.at}")
            return Saved(step=self.at, seconds=0.0)
        assert isinstance(action, Log)
        return None

    def stop(self, ending: Ending) -> Stopping:
        return Stopping(step=self.at, ending=ending)


def policies(
    *, total: int, evaluate: int = 0, save: int = 0, pause: int | None = None, saved: int | None = None
) -> tuple[Reactor, ...]:
    return (
        FiniteLoss(last_saved=saved),
        EvaluateEvery(steps=evaluate),
        SaveEvery(steps=save, saved=saved),
        EndAt(total_steps=total, pause_at=pause),
    )


def test_a_run_evaluates_and_saves_on_time_and_once_at_the_end() -> None:
    run = Pretend(policies(total=4, evaluate=2, save=3))
    assert fit(run) is Ending.FINISHED
    expected = ["step 1", "step 2", "evaluate 2", "step 3", "save 3", "step 4", "evaluate 4", "save 4"]
    assert run.done == expected


def test_a_run_with_no_intervals_evaluates_and_saves_at_the_end() -> None:
    run = Pretend(policies(total=2))
    fit(run)
    assert run.done == ["step 1", "step 2", "evaluate 2", "save 2"]


def test_a_signal_ends_after_the_step_and_saves_without_evaluating() -> None:
    run = Pretend(policies(total=9), stop_at=3)
    assert fit(run) is Ending.SIGNALLED
    assert run.done[-2:] == ["step 3", "save 3"]


def test_a_pause_comes_before_the_end_of_the_run() -> None:
    run = Pretend(policies(total=9, pause=2))
    assert fit(run) is Ending.PAUSED
    assert run.at == 2


def test_a_finished_run_that_is_resumed_trains_no_step_and_saves_nothing() -> None:
    run = Pretend(policies(total=5, saved=5), at=5)
    assert fit(run) is Ending.FINISHED
    assert run.done == ["evaluate 5"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails_naming_step_and_last_checkpoint(loss: float) -> None:
    run = Pretend(policies(total=9, save=2), losses={5: loss})
    with pytest.raises(WorkerFailed, match=r"the loss of step 5 is (nan|inf).*step 4 is saved"):
        fit(run)
    assert "save 5" not in run.done


def test_without_a_checkpoint_the_failure_says_so() -> None:
    with pytest.raises(WorkerFailed, match=r"no checkpoint was saved.*; begin again with a lower") as caught:
        fit(Pretend(policies(total=9), losses={1: math.nan}))
    assert "checkpoint" not in caught.value.problems[0].fix
    with pytest.raises(WorkerFailed, match=r"step 2 is saved.*; --resume goes on from step 2: try a lower"):
        fit(Pretend(policies(total=9, save=2), losses={3: math.nan}))


def test_what_an_action_brings_about_is_an_event_too() -> None:
    run = Pretend(policies(total=1))
    fit(run)
    kinds = [type(event).__name__ for event in run.events]
    assert kinds == ["Started", "StepDone", "Stopping", "Evaluated", "Saved"]
