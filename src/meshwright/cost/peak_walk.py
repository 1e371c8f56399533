"""The backwards of a step in which memory may be highest, and what a rank holds when each of them begins.

A rank's first backward has the most activations and no gradients; the one after it as many, or nearly, beside the
gradients of the first; and the last one drops whole parameters and whole gradients as it goes. Where a rank has several
stages that end one after another, each of them has such backwards, beside the activations of stages that come later and
the gradients of stages that are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.holding import Held, Moment, StageHeld, in_turns
from meshwright.cost.moments_eager import Beside, EagerMoments
from meshwright.cost.pipeline import Shape
from meshwright.cost.states import States, state_bytes
from meshwright.cost.synchronize import turns
from meshwright.cost.table import SCHEDULES, SHARDINGS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.plan import ScheduleKind, Sharding

_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of some stages of a rank the bytes that a microbatch keeps, trained parameters, and all of them."""

    kept: FloatArray
    made: FloatArray
    whole: FloatArray

    @classmethod
    def of(cls, stage: StageHeld) -> _Sums:
        return cls(stage.one_kept, stage.made, stage.whole)

    def less(self, other: _Sums) -> _Sums:
        parts = ((self.kept, other.kept), (self.made, other.made), (self.whole, other.whole))
        return _Sums(*(np.maximum(mine - its, 0.0) for mine, its in parts))

    def times(self, factor: float) -> _Sums:
        return _Sums(factor * self.kept, factor * self.made, factor * self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A stage of a rank, what its stages `below` hold, which end after it, and those `above`, which ended before; the
    part of the rank's stages that have `begun` to go back."""

    stage: StageHeld
    below: _Sums
    above: _Sums
    begun: FloatArray


class PeakWalk:
    """Backwards of every rank, all arrays of shape (rows, ranks)."""

    def __init__(self, table: PlanTable, found: States, entry: Held, *, shape: Shape) -> None:
        sizes = state_bytes(table)
        sharded = (table.sharding > 0)[:, None]
        self.found, self.entry = found, entry
        self.turns = in_turns(table)[:, None]
        self.breadth_first = (table.schedule == _BREADTH_FIRST)[:, None]
        self.microbatches = table.microbatches[:, None].astype(np.float64)
        self.last_ones = np.where(
            self.breadth_first, self.microbatches, np.minimum(shape.pipeline[:, None], self.microbatches)
        )
        self.chunks = table.chunks[:, None].astype(np.float64)
        shared = (turns(table) > 1.0)[:, None] & sharded
        master = sizes.master[:, None]
        whole = (table.sharding == _ZERO1)[:, None] | shared | ~sharded
        self.after = master * np.where(sharded, found.share, 1.0)
        self.sums = np.where(whole, master, self.after)
        zero3 = (table.sharding == _ZERO3)[:, None]
        self.copies = np.where(sharded & ~zero3, sizes.compute[:, None], 0.0)
        self.gathered = np.where(shared & zero3, sizes.compute[:, None], 0.0)

    def moments(self, told: EagerMoments) -> Iterator[Moment]:
        """Those of every backward that may be the heaviest, a stage without a head's when it holds most, and the
        optimizer's step."""
        entry = self.entry
        if not self.turns.all():
            for beside in self._together():
                yield from told.backward(beside)
        if entry.first is not None and entry.inner is not None and entry.last is not None:
            for place in self._places(entry.first, entry.inner, entry.last):
                for beside in self._in_turn(place, ends=place.stage is entry.last):
                    yield from told.backward(beside)
        gradients = np.where(entry.goes_on, self.found.summed, self.found.before)
        if entry.alone.any():
            yield told.without_head(entry.all_stages, gradients=gradients, kept=entry.alone)
        yield told.step()

    def _together(self) -> Iterator[Beside]:
        """The first backward, the second and the last, of all stages of a rank as though they were one."""
        found, entry, stage = self.found, self.entry, self.entry.all_stages
        several = self.microbatches > 1.0
        first = Beside(
            stage=stage,
            here=~self.turns,
            kept=entry.kept,
            logits=entry.logits,
            gradients=found.before,
            freed=np.zeros_like(entry.kept),
            sends=stage.sends,
            waits=entry.waits,
            sums=found.before > 0.0,
            ends=~several,
            follows=~self.turns,
        )
        second = replace(
            first,
            here=~self.turns & several,
            kept=np.maximum(entry.kept - np.where(entry.goes_on, 0.0, stage.one_kept), 0.0),
            logits=np.maximum(entry.logits - np.where(entry.goes_on, 0.0, stage.one_logits), 0.0),
            gradients=found.summed,
            sums=several | first.sums,
            ends=self.microbatches == 2.0,
            follows=entry.goes_on,
        )
        yield from (first, second)
        yield replace(
            second,
            kept=np.minimum(stage.one_kept, entry.kept),
            logits=np.minimum(stage.one_logits, entry.logits),
            ends=several,
            follows=None,
        )

    def _places(self, first: StageHeld, inner: StageHeld, last: StageHeld) -> Iterator[_Place]:
        """The last stage, those that are next to it and to the first one, and the first one."""
        whole, chunks = self.entry.all_stages, self.chunks
        nothing = _Sums.of(last).times(0.0)
        rest = _Sums.of(whole).less(_Sums.of(first))
        yield _Place(stage=last, below=_Sums.of(whole).less(_Sums.of(last)), above=nothing, begun=1.0 / chunks)
        if (self.breadth_first & (chunks > 2.0)).any():
            below = rest.less(_Sums.of(inner))
            late = _Sums.of(whole).less(_Sums.of(last)).less(_Sums.of(inner))
            yield _Place(stage=inner, below=late, above=_Sums.of(last), begun=2.0 / chunks)
            yield _Place(stage=inner, below=_Sums.of(first), above=below, begun=1.0 - 1.0 / chunks)
        yield _Place(stage=first, below=nothing, above=rest, begun=np.ones_like(chunks))

    def _in_turn(self, place: _Place, *, ends: bool) -> Iterator[Beside]:
        """The first backward of a stage, the second and the last. Those of breadth-first stages follow one another, and
        so do interleaved ones whose microbatches have all gone forward by then; else the rank's stages take turns, and
        the second one stands for all until the last ones come."""
        entry, found, own, m = self.entry, self.found, place.stage, self.microbatches
        apart = self.breadth_first | ~entry.goes_on
        begins = self.turns & (apart | ends)
        most = np.where(apart, m * (place.below.kept + own.one_kept), entry.kept)
        scores = np.where(apart, m * own.one_logits, entry.logits)
        done = found.before + self.after * place.above.made
        freed = self.copies * place.above.whole - self.gathered * own.whole
        summed = done + self.sums * own.made
        first = Beside(
            stage=own,
            here=begins,
            kept=most,
            logits=scores,
            gradients=done,
            freed=freed,
            sends=entry.all_stages.sends * np.where(self.breadth_first, place.begun, 1.0),
            waits=entry.waits,
            sums=found.before > 0.0,
            ends=m == 1.0,
            follows=begins,
        )
        several = self.turns & (m > 1.0)
        second = replace(
            first,
            here=several,
            kept=np.where(apart, most - own.one_kept, entry.kept),
            logits=np.where(apart, scores - own.one_logits, entry.logits),
            gradients=np.where(apart, summed, found.summed),
            freed=np.where(apart, freed, 0.0),
            sums=several,
            ends=apart & (m == 2.0),
            follows=~apart,
        )
        yield from (first, second)
        yield replace(
            second,
            kept=self.last_ones * place.below.kept + own.one_kept,
            logits=own.one_logits,
            gradients=summed + np.where(apart, 0.0, self.sums * place.below.made),
            freed=freed,
            ends=several,
            follows=None,
        )
