"""What a run does about a step whose loss or gradient norm is not a finite number or leaps: stop, skip its batch, roll
back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.spec.job import NonFinite, NonFiniteSpec, SpikeSpec
from meshwright.train.events import Action, Event, Log, RollBack, Save, Saved, Skip, StepDone, StepSpoilt

_REMEDY = "a lower learning rate, or clip the gradient norm"


@dataclass(slots=True, kw_only=True)
class OnSpoilt:
    """Answers spoilt steps as `non_finite` says, and those that leap as `spike` does. `last_saved` is the step of the
    newest checkpoint.

    A run that stops saves its last good state, unless that is saved or is itself not finite, and fails.
    """

    non_finite: NonFiniteSpec
    spike: SpikeSpec = field(default_factory=SpikeSpec)
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
        asked = self._asked(event)
        text = f"{_what(event)}; {{}}: {self.in_a_row} in a row of at most {asked.most_in_a_row}"
        goes_on = self.in_a_row <= asked.most_in_a_row
        if goes_on and asked.policy is NonFinite.SKIP and event.state_finite:
            skipped = {"skipped_batches": float(self.total)}
            return Skip(), Log(values=skipped, text=text.format("its batch is skipped"))
        if goes_on and asked.policy is NonFinite.ROLL_BACK and self.last_saved is not None:
            rolled = {"roll_backs": float(self.total)}
            return RollBack(), Log(values=rolled, text=text.format(f"back to step {self.last_saved}, past its batch"))
        good = event.step - 1
        if good and self.last_saved != good and event.state_finite:
            self.last = event
            return (Save(),)
        raise WorkerFailed(self._failure(event))

    def _asked(self, event: StepSpoilt) -> NonFiniteSpec:
        """What is to be done about the step."""
        if not event.unusual:
            return self.non_finite
        return NonFiniteSpec(policy=NonFinite(self.spike.policy), most_in_a_row=self.spike.most_in_a_row)

    def _failure(self, event: StepSpoilt) -> Problem:
        if self.last_saved is None:
            good, fix = "no checkpoint was saved before it", f"begin again with {_REMEDY}"
        else:
            good = f"step {self.last_saved} is saved"
            fix = f"--resume goes on from step {self.last_saved}: try {_REMEDY}"
            if self._asked(event).policy is not NonFinite.SKIP and event.state_finite:
                fix += f", or {'spike' if event.unusual else 'non_finite'}.policy = skip"
        why = event.unusual or "the run diverged or its data or precision is unfit"
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
    if event.unusual:
        return f"step {event.step} leaps ({event.unusual})"
    name, value = ("loss", event.loss) if not math.isfinite(event.loss) else ("gradient norm", event.grad_norm)
    return f"the {name} of step {event.step} is {value}"
