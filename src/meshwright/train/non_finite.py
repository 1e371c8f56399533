"""What a run does about a step whose loss or gradient norm is not a finite number: stop, skip its batch, roll back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.spec.job import NonFinite, NonFiniteSpec
from meshwright.train.events import Action, Event, Log, RollBack, Save, Saved, Skip, StepDone, StepSpoilt

_REMEDY = "a lower learning rate, or clip the gradient norm"


@dataclass(slots=True, kw_only=True)
class OnNonFinite:
    """Answers spoilt steps as `spec` says. `last_saved` is the step of the newest checkpoint.

    A run that stops saves its last good state, unless that is saved or is itself not finite, and fails.
    """

    spec: NonFiniteSpec
    last_saved: int | None = None
    furthest: int = 0
    in_a_row: int = 0
    total: int = 0
    last: StepSpoilt | None = None

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Saved):
            self.last_saved = event.step
            if self.last is not None:
                raise WorkerFailed(self._failure(self.last))
        if isinstance(event, StepDone) and event.step > self.furthest:
            self.furthest, self.in_a_row = event.step, 0
        return self._answer(event) if isinstance(event, StepSpoilt) else ()

    def _answer(self, event: StepSpoilt) -> tuple[Action, ...]:
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        text = f"{_what(event)}; {{}}: {self.in_a_row} in a row of at most {self.spec.most_in_a_row}"
        goes_on = self.in_a_row <= self.spec.most_in_a_row
        if goes_on and self.spec.policy is NonFinite.SKIP and event.state_finite:
            skipped = {"skipped_batches": float(self.total)}
            return Skip(), Log(values=skipped, text=text.format("its batch is skipped"))
        if goes_on and self.spec.policy is NonFinite.ROLL_BACK and self.last_saved is not None:
            rolled = {"roll_backs": float(self.total)}
            return RollBack(), Log(values=rolled, text=text.format(f"back to step {self.last_saved}, past its batch"))
        good = event.step - 1
        if good and self.last_saved != good and event.state_finite:
            self.last = event
            return (Save(),)
        raise WorkerFailed(self._failure(event))

    def _failure(self, event: StepSpoilt) -> Problem:
        if self.last_saved is None:
            good, fix = "no checkpoint was saved before it", f"begin again with {_REMEDY}"
        else:
            good = f"step {self.last_saved} is saved"
            fix = f"--resume goes on from step {self.last_saved}: try {_REMEDY}"
            if self.spec.policy is not NonFinite.SKIP and event.state_finite:
                fix += ", or non_finite.policy = skip"
        why = "the run diverged or its data or precision is unfit"
        if not event.num_targets:
            why, fix = (
                "all of its tokens are of prompts",
                "take larger batches, or --resume with non_finite.policy = skip",
            )
        if not event.state_finite:
            why = "parameters are not finite already, which no other batch mends"
        if self.in_a_row > 1:
            why = f"{self.in_a_row} steps in a row were like it; {why}"
        return Problem(what=_what(event), where=f"step {event.step}", why=f"{why}; {good}", fix=fix)


def _what(event: StepSpoilt) -> str:
    if not event.num_targets:
        return f"the batch of step {event.step} has no target"
    name, value = ("loss", event.loss) if not math.isfinite(event.loss) else ("gradient norm", event.grad_norm)
    return f"the {name} of step {event.step} is {value}"
