"""Interval: checkpoints as often as loses least time to them and to failures, by what both cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from meshwright.cost.goodput import save
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.goodput import Goodput
from meshwright.spec.report import Report
from meshwright.spec.units import format_seconds
from meshwright.train.events import Action, Event, Log, Save, Saved, Started, StepDone, Stopping

# The first save tells what saves take, and that the disk takes them at all: it is not put off for long.
MEASURING_STEPS = 20
_WORTH_TELLING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Seconds of a step, that a save stops training, until it is safe, to go on after a failure, between failures."""

    step_seconds: float
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    seconds_between_failures: float

    @property
    def steps(self) -> int:
        """Steps between checkpoints that lose least time (Daly 2006, in cost/goodput.py), one at least."""
        chosen = save(
            step_seconds=self.step_seconds,
            stall_seconds=self.stall_seconds,
            write_seconds=self.write_seconds,
            restart_seconds=self.restart_seconds,
            seconds_between_failures=self.seconds_between_failures,
        )
        return max(1, round(chosen.every_seconds / self.step_seconds))


def predicted_costs(predicted: Report) -> SaveCosts:
    """Before anything is measured. Raises ConfigError where nobody says how often the devices fail."""
    told = predicted.outlook
    if told is None or not told.hours_between_failures:
        raise ConfigError(
            Problem(
                what="how often these devices fail is not known, and so not how often to save",
                where="job.checkpoint.interval",
                fix="--set cluster.groups.0.device.hours_between_failures=50000; or set checkpoint.every_steps",
            )
        )
    return SaveCosts(
        step_seconds=predicted.step_seconds,
        stall_seconds=told.stall_seconds,
        write_seconds=told.write_seconds,
        restart_seconds=told.restart_seconds,
        seconds_between_failures=3600.0 * told.hours_between_failures,
    )


def with_failures(costs: SaveCosts, *, past: Goodput | None) -> SaveCosts:
    """As often as the run has failed until now and as its devices are said to: what is said counts as one failure
    (the mean of a gamma distribution of that shape)."""
    if past is None:
        return costs
    return replace(
        costs,
        seconds_between_failures=(costs.seconds_between_failures + past.held_seconds) / (1 + past.failures),
    )


@dataclass(slots=True, kw_only=True)
class SaveForGoodput:
    """A checkpoint every so many steps as `costs` make best, and at the end unless that step is saved already.

    The first comes after `MEASURING_STEPS` at the latest; each says what it and steps really took, and the interval is
    chosen again.
    """

    costs: SaveCosts
    saved: int | None = None
    every: int = field(init=False, default=0)
    due: int = field(init=False, default=0)

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            self.every = self.costs.steps
            self.due = event.step + min(self.every, MEASURING_STEPS)
            return (Log(text=self._words("as predicted")),)
        if isinstance(event, Saved):
            return self._choose(event)
        if isinstance(event, StepDone) and event.step >= self.due:
            return (Save(),)
        return (Save(),) if isinstance(event, Stopping) and self.saved != event.step else ()

    def _choose(self, event: Saved) -> tuple[Action, ...]:
        before, self.saved = self.every, event.step
        self.costs = replace(
            self.costs,
            step_seconds=event.step_seconds or self.costs.step_seconds,
            stall_seconds=event.seconds,
            write_seconds=max(event.seconds, event.write_seconds or self.costs.write_seconds),
        )
        self.every = self.costs.steps
        self.due = event.step + self.every
        changed = abs(self.every - before) > _WORTH_TELLING * before
        return (Log(text=self._words("as measured")),) if changed else ()

    def _words(self, known: str) -> str:
        steps = "step" if self.every == 1 else f"{self.every:,} steps"
        stall, apart = format_seconds(self.costs.stall_seconds), format_seconds(self.costs.seconds_between_failures)
        return f"a checkpoint every {steps}: saves stall {stall} {known}, one failure in {apart} is expected"
