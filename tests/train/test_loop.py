"""The loop and its policies over a run that trains nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from meshwright.spec.errors import WorkerFailed
from meshwright.spec.job import NonFinite, NonFiniteSpec
from meshwright.train.events import (
    Action,
    Ending,
    Evaluate,
    Evaluated,
    Event,
    Log,
    Reactor,
    RollBack,
    Save,
    Saved,
    Skip,
    Started,
    StepDone,
    StepSpoilt,
    Stopping,
)
from meshwright.train.loop import fit
from meshwright.train.policies import EndAt, EvaluateEvery, SaveEvery
from meshwright.train.spoilt import OnSpoilt


@dataclass
class Pretend:
    """A run of steps whose losses are given by the batch; keeps what was done, in order."""

    reactors: tuple[Reactor, ...]
    at: int = 0
    batch: int = 0
    saved: int = 0
    state_finite: bool = True
    losses: dict[int, float] = field(default_factory=dict)
    stop_at: int | None = None
    done: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def start(self) -> Started:
        return Started(step=self.at, total_steps=99)

    def step(self) -> StepDone | StepSpoilt:
        loss = self.losses.get(self.batch + 1, 1.0)
        if not math.isfinite(loss):
            return StepSpoilt(step=self.at + 1, loss=loss, grad_norm=1.0, num_targets=9, state_finite=self.state_finite)
        self.at, self.batch = self.at + 1, self.batch + 1
        self.done.append(f"step {self.at}")
        return StepDone(
            step=self.at,
            tokens=self.at * 10,
            loss=loss,
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
            self.saved = self.at
            self.done.append(f"save {self.at}")
            return Saved(step=self.at, seconds=0.0)
        if isinstance(action, Skip | RollBack):
            self.batch += 1
            if isinstance(action, RollBack):
                self.at = self.saved if action.to is None else action.to
            self.done.append(f"{type(action).__name__} {self.at}")
            return None
        assert isinstance(action, Log)
        return None

    def stop(self, ending: Ending) -> Stopping:
        return Stopping(step=self.at, ending=ending)


def policies(
    *,
    total: int,
    evaluate: int = 0,
    save: int = 0,
    pause: int | None = None,
    saved: int | None = None,
    policy: NonFinite = NonFinite.STOP,
) -> tuple[Reactor, ...]:
    return (
        OnSpoilt(non_finite=NonFiniteSpec(policy=policy, most_in_a_row=2), last_saved=saved),
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
def test_a_loss_that_is_not_finite_fails_with_the_step_before_it_saved(loss: float) -> None:
    run = Pretend(policies(total=9, save=3), losses={5: loss})
    with pytest.raises(WorkerFailed, match=r"the loss of step 5 is (nan|inf).*step 4 is saved"):
        fit(run)
    assert run.done[-2:] == ["step 4", "save 4"]
    run = Pretend(policies(total=9, save=2), losses={5: loss})
    with pytest.raises(WorkerFailed, match=r"step 4 is saved.*goes on from step 4: try a lower"):
        fit(run)
    assert run.done.count("save 4") == 1


def test_what_is_not_finite_itself_is_not_saved() -> None:
    run = Pretend(policies(total=9, save=3, policy=NonFinite.SKIP), losses={5: math.nan}, state_finite=False)
    with pytest.raises(WorkerFailed, match=r"parameters are not finite already.*; step 3 is saved"):
        fit(run)
    assert run.done[-1] == "step 4"


def test_a_first_step_that_fails_leaves_nothing_to_go_on_from() -> None:
    with pytest.raises(WorkerFailed, match=r"no checkpoint was saved.*; begin again with a lower") as caught:
        fit(Pretend(policies(total=9), losses={1: math.nan}))
    assert "checkpoint" not in caught.value.problems[0].fix


def test_a_batch_without_targets_is_said() -> None:
    policy = OnSpoilt(non_finite=NonFiniteSpec())
    spoilt = StepSpoilt(step=1, loss=0.0, grad_norm=0.0, num_targets=0, state_finite=True)
    with pytest.raises(WorkerFailed, match=r"the batch of step 1 has no target \(all of its tokens are of prompts"):
        policy.react(spoilt)


def test_a_skipped_batch_leaves_the_steps_as_they_are() -> None:
    run = Pretend(policies(total=4, policy=NonFinite.SKIP), losses={3: math.nan, 4: math.inf, 6: math.nan})
    assert fit(run) is Ending.FINISHED
    assert run.done[:7] == ["step 1", "step 2", "Skip 2", "Skip 2", "step 3", "Skip 3", "step 4"]
    assert run.batch == 7


def test_a_run_goes_back_to_its_checkpoint_and_past_the_batch() -> None:
    run = Pretend(policies(total=4, save=2, policy=NonFinite.ROLL_BACK), losses={4: math.nan})
    assert fit(run) is Ending.FINISHED
    assert run.done[:6] == ["step 1", "step 2", "save 2", "step 3", "RollBack 2", "step 3"]
    assert run.batch == 6
    with pytest.raises(WorkerFailed, match="no checkpoint was saved before it"):
        fit(Pretend(policies(total=4, save=2, policy=NonFinite.ROLL_BACK), losses={1: math.nan}))


@pytest.mark.parametrize("policy", [NonFinite.SKIP, NonFinite.ROLL_BACK])
def test_too_many_in_a_row_stop_the_run(policy: NonFinite) -> None:
    losses = dict.fromkeys(range(4, 40, 1 if policy is NonFinite.SKIP else 2), math.nan)
    run = Pretend(policies(total=9, save=2, policy=policy), losses=losses)
    with pytest.raises(WorkerFailed, match=r"3 steps in a row were like it.*; step 3 is saved"):
        fit(run)
    assert [entry for entry in run.done if "Skip" in entry or "Roll" in entry] == [
        f"{'Skip 3' if policy is NonFinite.SKIP else 'RollBack 2'}"
    ] * 2


@dataclass
class Undoes:
    """Goes back to step 2 once, from the first event of its kind at step 4."""

    kind: type[StepDone | Saved]
    left: int = 1

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, self.kind) and event.step == 4 and self.left:
            self.left -= 1
            yield RollBack(to=2)


@pytest.mark.parametrize("kind", [StepDone, Saved])
def test_a_stop_asked_for_at_a_step_that_is_undone_is_forgotten(kind: type[StepDone | Saved]) -> None:
    ends = policies(total=4, save=2)
    for first in (True, False):
        run = Pretend((Undoes(kind), *ends) if first else (*ends, Undoes(kind)))
        assert fit(run) is Ending.FINISHED
        assert run.at == 4
        assert [each for each in run.done if "step" in each or "RollBack" in each] == [
            *("step 1", "step 2", "step 3", "step 4", "RollBack 2", "step 3", "step 4")
        ]
        assert "save 4" in run.done[-2:]


def test_what_an_action_brings_about_is_an_event_too() -> None:
    run = Pretend(policies(total=1))
    fit(run)
    kinds = [type(event).__name__ for event in run.events]
    assert kinds == ["Started", "StepDone", "Stopping", "Evaluated", "Saved"]
