"""When a run evaluates, saves and stops: each policy reacts to events, and knows nothing of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    StepSpoilt,
    Stop,
    Stopping,
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
        if isinstance(event, Stopping) and event.ending is not Ending.SIGNALLED and self.evaluated != event.step:
            return (Evaluate(),)
        return ()


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
        ending = self._ending(event) if isinstance(event, Started | StepDone | StepSpoilt) else None
        return (Stop(ending=ending),) if ending else ()

    def _ending(self, event: Started | StepDone | StepSpoilt) -> Ending | None:
        if isinstance(event, StepSpoilt):
            return Ending.SIGNALLED if event.stop_asked else None
        if event.step >= self.total_steps:
            return Ending.FINISHED
        if isinstance(event, StepDone) and event.stop_asked:
            return Ending.SIGNALLED
        if self.pause_at is not None and event.step >= self.pause_at:
            return Ending.PAUSED
        return None
