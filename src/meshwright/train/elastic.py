"""Elastic: a run whose ranks may change copies its state in memory, and goes on from there on those that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.cost.learner_holdings import Origins
from meshwright.cost.way import Way
from meshwright.parallel import outer, relocate
from meshwright.parallel.portable import portable
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
    """The state after `step` that the ranks before have left, as copies; `progress` is None where this process does not
    tell it. Learner i goes on as learner `origins[i]` did, or begins where that is None. The `way` from there is known
    where it was worked out before."""

    step: int
    source: relocate.State
    progress: Mapping[str, Any] | None
    origins: Origins = ()
    way: Way | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a process takes its rank: `change_asked` says that ranks are to change after this step, `change` why they
    have, `inherited` what to go on from in place of the newest checkpoint; the run pauses at step `pause_at`."""

    change_asked: Callable[[], bool]
    change: Change | None = None
    inherited: Inherited | None = None
    pause_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """Of `learners`, those that are `lost`, as they were numbered, with `dropped` sequences that they had read and not
    met with, and those that are `new`, as they are numbered now."""

    learners: int
    lost: tuple[int, ...]
    new: tuple[int, ...]
    dropped: int

    def words(self) -> str:
        """`2 learners without learner 1, of which 24 sequences had not met and are dropped`."""
        told = f"{self.learners} learner{'s' * (self.learners != 1)}"
        if self.lost:
            told += f" without {_named(self.lost)}, of which {self.dropped:,} sequences had not met and are dropped"
        if self.new:
            told += f"; {_named(self.new)} begins where the others met: what its ranks had before is stale and not used"
        return told


def _named(learners: tuple[int, ...]) -> str:
    return f"learner{'s' * (len(learners) > 1)} {', '.join(map(str, learners))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a run whose ranks may change has besides."""

    copies: Copies
    change_asked: Callable[[], bool]
    change: Change | None
    inherited: Regrouped | None = None


@dataclass(slots=True, kw_only=True)
class KeepCopies:
    """A copy when a run starts, every `steps` steps or where ranks are together next, and before its ranks change, for
    which it leaves off. The newest is of step `last`; where ranks came and none was lost it is what they go on from,
    which those who were there keep."""

    steps: int
    change: Change | None
    inherited: Regrouped | None = None
    last: int = 0

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            self.last = event.step
            return (*self._told(event.step), *(() if self._is_kept else (CopyState(),)))
        if not isinstance(event, StepDone):
            return ()
        if event.change_asked:
            return CopyState(), Stop(ending=Ending.REGROUPING)
        if not event.together or event.step // self.steps == self.last // self.steps:
            return ()
        self.last = event.step
        return (CopyState(),)

    @property
    def _is_kept(self) -> bool:
        return self.change is not None and not (self.change.lost or self.change.from_checkpoint)

    def _told(self, step: int) -> tuple[Action, ...]:
        if self.change is None:
            return ()
        stopped = max(time.time() - self.change.since, 0.0)
        values = {
            "ranks": float(self.change.ranks),
            "regroup_seconds": stopped,
            "undone_steps": float(self.change.undone_steps),
        }
        if self.inherited is not None:
            values |= {"learners": float(self.inherited.learners), "dropped_sequences": float(self.inherited.dropped)}
        return (Log(values=values, text=self.change.words(step=step)),)


def copy_state(run: Run) -> None:
    """Every rank has a copy of where the run stands now. Collective."""
    assert run.membership is not None, "only runs whose ranks may change are copied"
    run.marker.mark(step=run.state.step, section=Section.COPY)
    run.ledger.gather(run.learners, run.outer, device=run.feed.device)
    # Who else holds what is of no use here, and takes longer to tell than a small state to copy.
    tensors = portable(run.laid, run.optimizer).tensors if run.outer is None else _kept(run).tensors
    run.membership.copies.take(tensors, step=run.state.step, progress=run.progress())


def take_over(run: Run, inherited: Inherited) -> None:
    """The run stands where the ranks before stood when they copied it. Collective."""
    way = inherited.way
    if way is None:
        target = _kept(run, origins=inherited.origins)
    else:
        target = relocate.State(held=way.target, own=portable(run.laid, run.optimizer))
    moved = relocate.move(inherited.source, target, group=run.learners.everyone, progress=inherited.progress, way=way)
    assert moved.progress is not None, "whoever has a copy tells where it stands"
    run.stand(moved.progress)
    if run.outer is not None:
        assert run.membership is not None, "only runs whose ranks may change inherit"
        assert run.membership.change is not None, "whoever inherits says why"
        regrouped = _regrouped(run.outer, moved.progress["learners"], origins=inherited.origins, step=run.state.step)
        change = replace(run.membership.change, why=f"{run.membership.change.why}; {regrouped.words()}")
        run.membership = replace(run.membership, change=change, inherited=regrouped)
        run.ledger.dropped += regrouped.dropped


def _kept(run: Run, *, origins: Origins | None = None) -> relocate.State:
    """What copies have of the run, and what goes on from them."""
    state = run.laid_state()
    return state if run.outer is None else outer.remembered(run.design, state, run.outer, origins=origins)


def _regrouped(met: outer.OuterSync, told: Mapping[str, Any], *, origins: Origins, step: int) -> Regrouped:
    return Regrouped(
        learners=met.learners.count,
        lost=tuple(learner for learner in range(told["count"]) if learner not in origins),
        new=tuple(learner for learner, origin in enumerate(origins) if origin is None),
        dropped=met.take_over(told, origins=origins, step=step),
    )


def abandon(run: Run) -> None:
    """No thread of the run is left and its trackers have what they were given; the groups of its ranks may be gone."""
    run.store.abandon()
    run.loader.close()
    if run.observer is not None:
        run.observer.leave()
