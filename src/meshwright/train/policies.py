"""When a run evaluates, saves and stops: each policy reacts to events, and knows nothing of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.train.events import (
    Action,
    Ending,
    Evaluate,
    Evaluated,
    Event,
    Save,
    Saved,
    Started,
    StepDone,
    Stop,
    Stopping,
)


@dataclass(slots=True, kw_only=True)
class FiniteLoss:
    """The run fails at the first loss or gradient norm that is not a finite number."""

    last_saved: int | None = None

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Saved):
            self.last_saved = event.step
        if isinstance(event, StepDone) and not (math.isfinite(event.loss) and math.isfinite(event.grad_norm)):
            raise WorkerFailed(self._problem(event))
        return ()

    def _problem(self, event: StepDone) -> Problem:
        what = "loss" if not math.isfinite(event.loss) else "gradient norm"
        value = event.loss if what == "loss" else event.grad_norm
        remedy = "a lower learning rate, or clip the gradient norm"
        if self.last_saved is None:
            good, fix = "no checkpoint was saved before it", f"begin again with {remedy}"
        else:
            good, fix = (
                f"step {self.last_saved} is saved",
                f"--resume goes on from step {self.last_saved}: try {remedy}",
            )
        return Problem(
            what=f"the {what} of step {event.step} is {value}",
            where=f"step {event.step}",
            why=f"the run diverged or its data or precision is unfit; {good}",
            fix=fix,
        )


@dataclass(slots=True, kw_only=True)
class EvaluateEvery:
    """Validation loss every `steps` steps (0: never on the way), and at the end unless a signal asks for haste."""

    steps: int
    evaluated: int = -1

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Evaluated):
            self.evaluated = event.step
        if isinstance(event, StepDone) and self.steps and event.step % self.steps == 0:
            return (Evaluate(),)
        last = isinstance(event, Stopping) and event.ending is not Ending.SIGNALLED
        return (Evaluate(),) if last and self.evaluated != event.step else ()


@dataclass(slots=True, kw_only=True)
class SaveEvery:
    """A checkpoint every `steps` steps (0: never on the way), and at the end unless that step is saved already."""

    steps: int
    saved: int | None = None

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Saved):
            self.saved = event.step
        if isinstance(event, StepDone) and self.steps and event.step % self.steps == 0:
            return (Save(),)
        return (Save(),) if isinstance(event, Stopping) and self.saved != event.step else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAt:
    """The run stops at `total_steps`, at `pause_at` when that is sooner, or when a rank was asked to stop."""

    total_steps: int
    pause_at: int | None = None

    def react(self, event: Event) -> Iterable[Action]:
        ending = self._ending(event) if isinstance(event, Started | StepDone) else None
        return (Stop(ending=ending),) if ending else ()

    def _ending(self, event: Started | StepDone) -> Ending | None:
        if event.step >= self.total_steps:
            return Ending.FINISHED
        if isinstance(event, StepDone) and event.stop_asked:
            return Ending.SIGNALLED
        if self.pause_at is not None and event.step >= self.pause_at:
            return Ending.PAUSED
        return None
