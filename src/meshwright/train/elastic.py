"""Elastic: a run whose ranks may change copies its state in memory, and goes on from there on those that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.parallel import relocate
from meshwright.spec.units import format_seconds
from meshwright.train.copies import Copies
from meshwright.train.events import Action, CopyState, Ending, Event, Log, Started, StepDone, Stop
from meshwright.train.observe.whereabouts import Section

if TYPE_CHECKING:
    from meshwright.train.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Why a run has other ranks than before, whether one was `lost`, and since when that was known, in seconds of the
    system clock.

    `plan` is the new one in words, `ranks` how many there are, and `undone_steps` were done and are done again.
    """

    why: str
    lost: bool
    since: float
    ranks: int
    plan: str
    undone_steps: int = 0
    from_checkpoint: bool = False

    def words(self, *, step: int) -> str:
        """What a person is told when the run goes on after `step`."""
        took = format_seconds(max(time.time() - self.since, 0.0))
        again = f"{self.undone_steps} step{'' if self.undone_steps == 1 else 's'} done again"
        source = "the newest checkpoint" if self.from_checkpoint else "copies in memory"
        return f"{self.why}: on from step {step} after {took}, from {source}, {again}; {self.plan}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """The state after `step` that the ranks before have left, as copies; `progress` is None where this process had no
    rank then."""

    step: int
    source: relocate.State
    progress: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a process takes its rank: `change_asked` says that ranks are to change after this step, `change` why they
    have, `inherited` what to go on from in place of the newest checkpoint; the run pauses at step `pause_at`."""

    change_asked: Callable[[], bool]
    change: Change | None = None
    inherited: Inherited | None = None
    pause_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a run whose ranks may change has besides."""

    copies: Copies
    change_asked: Callable[[], bool]
    change: Change | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCopies:
    """A copy when a run starts, every `steps` steps, and before its ranks change, for which it leaves off."""

    steps: int
    change: Change | None

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            return (*self._told(event.step), CopyState())
        if not isinstance(event, StepDone):
            return ()
        if event.change_asked:
            return CopyState(), Stop(ending=Ending.REGROUPING)
        return (CopyState(),) if event.step % self.steps == 0 else ()

    def _told(self, step: int) -> tuple[Action, ...]:
        if self.change is None:
            return ()
        stopped = max(time.time() - self.change.since, 0.0)
        values = {
            "ranks": float(self.change.ranks),
            "regroup_seconds": stopped,
            "undone_steps": float(self.change.undone_steps),
        }
        return (Log(values=values, text=self.change.words(step=step)),)


def copy_state(run: Run) -> None:
    """Every rank has a copy of where the run stands now. Collective."""
    assert run.membership is not None, "only runs whose ranks may change are copied"
    run.marker.mark(step=run.state.step, section=Section.COPY)
    run.ledger.gather(run.learners, run.outer, device=run.feed.device)
    run.membership.copies.take(run.laid_state(), step=run.state.step, progress=run.progress())


def take_over(run: Run, inherited: Inherited) -> None:
    """The run stands where the ranks before stood when they copied it. Collective."""
    group = run.learners.mesh.everyone
    moved = relocate.move(inherited.source, run.laid_state(), group=group, progress=inherited.progress)
    assert moved.progress is not None, "whoever has a copy tells where it stands"
    run.stand(moved.progress)


def abandon(run: Run) -> None:
    """No thread of the run is left and its trackers have what they were given; the groups of its ranks may be gone."""
    run.store.abandon()
    run.loader.close()
    if run.observer is not None:
        run.observer.leave()
