"""The training loop: run a step, emit what happened, perform the actions that come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from meshwright.train.events import Action, Ending, Event, RollBack, Started, StepDone, StepSpoilt, Stop, Stopping


class Runnable(Protocol):
    """What the loop needs of a run."""

    def start(self) -> Started: ...

    def step(self) -> StepDone | StepSpoilt: ...

    def react(self, event: Event) -> Iterable[Action]: ...

    def perform(self, action: Action) -> Event | None: ...

    def stop(self, ending: Ending) -> Stopping: ...


def fit(run: Runnable) -> Ending:
    """The run has ended for the reason returned, and every action of its last event is done; one that regroups has not
    ended, and nobody is told that it stops."""
    ending = emit(run, run.start())
    while ending is None:
        ending = emit(run, run.step())
    if ending is not Ending.REGROUPING:
        emit(run, run.stop(ending))
    return ending


def emit(run: Runnable, event: Event) -> Ending | None:
    """Every action that `event` calls for is performed, and those their own events call for; the ending asked for.

    A stop is obeyed after the other actions of the event, so that what a policy saves on the last step is saved. A
    roll back undoes the step: a stop that is asked for at it, and events that nobody has answered yet, are forgotten.
    """
    ending: Ending | None = None
    undone = False
    pending: list[Event] = [event]
    while pending:
        for action in run.react(pending.pop(0)):
            if isinstance(action, Stop):
                ending = ending or action.ending
                continue
            if isinstance(action, RollBack):
                undone = True
                pending.clear()
            followed = run.perform(action)
            if followed is not None:
                pending.append(followed)
    return None if undone else ending
