"""The backwards of a step in which memory may be highest, and what a rank holds when each of them begins.

A rank's first backward has the most activations and no gradients; the one after it as many, or nearly, beside the
gradients of the first; and the last one drops whole parameters and whole gradients as it goes. Where a rank has several
stages that end one after another, each of them has such backwards, beside the activations of stages that come later and
the gradients of stages that are done. A backward that another one cannot be below is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.cost.holding import StageHeld
from meshwright.cost.peak_parts import Beside, Rows
from meshwright.cost.slices_held import Phase
from meshwright.cost.table import BoolArray, IntArray
from meshwright.cost.work import FloatArray

Count = Callable[[FloatArray], StageHeld]
_TOGETHER, _BEGINS, _ENDS, _APART, _TURNS = 1, 2, 4, 8, 16
UNLIKE, UNITS = 32, 64


def needs(at: Rows, *, unlike: BoolArray) -> IntArray:
    """Which backwards rows need, a number for each row: those that need the same are walked together. Rows whose blocks
    are sharded in `unlike` ways are apart, and so are those of which experts are units of their own."""
    setting, entry = at.setting, at.entry
    turns, first = setting.in_turns[:, 0], setting.breadth_first[:, 0]
    begins = (~entry.goes_on | (setting.microbatches == 1.0)).any(axis=1)
    ends = setting.sums_whole[:, 0] | unlike
    if at.way is not None:
        ends = ends | (at.way.sent > 0.0).any(axis=1)
    steady = entry.goes_on.any(axis=1) & ~first
    apart = turns & (first | begins | ends)
    together = ~turns | steady
    found = together * _TOGETHER + begins * _BEGINS + ends * _ENDS + apart * _APART + turns * _TURNS
    return np.asarray(found + unlike * UNLIKE + ~unlike * _units(at))


def backwards(at: Rows, need: int, *, counts: Mapping[str, FloatArray], count: Count) -> Iterator[Beside]:
    """Of rows that all need the same; `count` tells what stages hold whose blocks are counted."""
    if need & _TOGETHER:
        yield from _together(at, need, count(counts["last"]) if at.setting.in_pairs.any() else None)
    if need & _APART:
        for place in _places(at, counts, count):
            yield from _in_turn(at, place, need)


def least_needs(at: Rows) -> IntArray:
    """As `needs`, of the one backward of every row in which most have their peak: the second, and the first of rows of
    which a rank has none that goes on from as much."""
    usual, turns = _second(at).here.all(axis=1), at.setting.in_turns[:, 0]
    return np.asarray(np.where(usual, 0, np.where(turns, _APART, _BEGINS)) + _TOGETHER + _units(at))


def _units(at: Rows) -> IntArray:
    """UNITS of rows that have experts of their own."""
    return np.asarray((at.entry.all_stages.unit > 0.0).any(axis=1) * UNITS)


def least_backwards(at: Rows, need: int, *, counts: Mapping[str, FloatArray], count: Count) -> Iterator[Beside]:
    """As `backwards`, of `least_needs`."""
    second = _second(at)
    if second.here.any():
        yield _sliced(second, at, "second")
    if need & _BEGINS:
        yield _sliced(_first(at, second), at, "first")
    if need & _APART:
        yield next(_in_turn(at, next(_places(at, counts, count)), need))


def _second(at: Rows) -> Beside:
    """The second one, of all stages of a rank as though they were one; of those that take turns the first one's comes
    to the table. It is none of stages that end before the others begin."""
    found, entry, setting = at.found, at.entry, at.setting
    stage, goes_on = entry.all_stages, entry.goes_on
    turns, several = setting.in_turns, setting.microbatches > 1.0
    one = np.where(turns, entry.first_kept, stage.one_kept)
    # Of a V all have gone down: one is back when the other stage has as many as ever.
    gone = np.where(setting.in_pairs, entry.first_kept, one)
    scored = np.where(setting.in_pairs, 0.0, stage.one_logits)
    return Beside(
        stage=replace(stage, one_kept=one, behind_head=entry.behind_head),
        here=several & (~turns | goes_on),
        kept=np.maximum(entry.kept - np.where(goes_on, 0.0, gone), 0.0),
        logits=np.maximum(entry.logits - np.where(goes_on, 0.0, scored), 0.0),
        gradients=found.summed,
        apart=np.where(several, 0.0, found.apart),
        freed=0.0,
        sends=stage.sends,
        waits=entry.waits,
        sums=several | (found.before > found.left),
        ends=~turns & (setting.microbatches == 2.0),
        follows=goes_on | setting.in_pairs,
        up=setting.in_pairs,
    )


def _together(at: Rows, need: int, upper: StageHeld | None) -> Iterator[Beside]:
    """The first backward, the second and the last, of all stages of a rank as though they were one; the `upper` one of
    a V has gone back before the other one does."""
    several, second = at.setting.microbatches > 1.0, _second(at)
    yield _sliced(second, at, "second")
    if need & _TURNS:
        return
    if at.entry.sliced is not None and at.entry.sliced.again.here.any():
        again = _sliced(second, at, "again")
        yield replace(again, here=again.here & at.entry.sliced.again.here)
    if need & _BEGINS:
        first = _sliced(_first(at, second), at, "first")
        if upper is not None:
            pairs = at.setting.in_pairs
            first = replace(first, gradients=first.gradients + pairs * _made(at, upper), done=pairs * upper.made)
        yield first
    if need & _ENDS:
        yield replace(
            second,
            here=np.broadcast_to(several, at.entry.kept.shape),
            kept=np.minimum(second.stage.one_kept, at.entry.kept),
            logits=np.minimum(second.stage.one_logits, at.entry.logits),
            ends=several,
            follows=None,
            up=False,
        )


def _first(at: Rows, second: Beside) -> Beside:
    """The first backward, where the `second` one goes on from as much or is none."""
    found, entry = at.found, at.entry
    several = at.setting.microbatches > 1.0
    return replace(
        second,
        here=~entry.goes_on | ~several,
        kept=entry.kept,
        logits=entry.logits,
        gradients=found.before,
        apart=found.apart,
        sums=found.before > found.left,
        ends=~several,
        follows=np.ones_like(entry.goes_on),
    )


def _made(at: Rows, stage: StageHeld) -> FloatArray:
    """Bytes of a stage's gradients when it has gone back, but for those that lie in buckets before any backward."""
    found, setting = at.found, at.setting
    there = found.before > found.left
    after = np.where(there, 0.0, setting.master * np.where(setting.sharded, found.share, 1.0))
    whole = np.where(there, 0.0, setting.master - after)
    beyond = np.where(there | setting.sums_whole, 0.0, found.beyond * stage.units)
    return np.asarray(after * stage.made + beyond + found.apart * stage.experts + whole * stage.added)


def _sliced(found: Beside, at: Rows, name: str) -> Beside:
    """The same of the slice that goes back then, where microbatches come in slices."""
    sliced = at.entry.sliced
    if sliced is None:
        return found
    phase: Phase = getattr(sliced, name)
    stage = replace(found.stage, one_kept=found.stage.one_kept + phase.own)
    return replace(found, stage=stage, kept=np.maximum(found.kept + phase.beside, 0.0))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of some stages of a rank the bytes that a microbatch keeps, trained parameters and beside them those of experts
    apart, those of them that are units of experts, those whose gradients are summed whole, and those that stay whole
    until their stage ends."""

    kept: FloatArray
    made: FloatArray
    experts: FloatArray
    units: FloatArray
    added: FloatArray
    stays: FloatArray

    @classmethod
    def of(cls, stage: StageHeld) -> _Sums:
        return cls(stage.one_kept, stage.made, stage.experts, stage.units, stage.added, stage.stays)

    def less(self, *others: _Sums) -> _Sums:
        names = [field.name for field in fields(self)]
        parts = {name: sum((getattr(other, name) for other in others), 0.0 * self.kept) for name in names}
        return _Sums(**{name: np.maximum(getattr(self, name) - part, 0.0) for name, part in parts.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A stage of a rank, what its stages `below` hold, which end after it, and those `above`, which ended before; the
    part of the rank's stages that have `begun` to go back. The `last` one goes back first."""

    stage: StageHeld
    below: _Sums
    above: _Sums
    begun: FloatArray
    last: bool = False


def _places(at: Rows, counts: Mapping[str, FloatArray], count: Count) -> Iterator[_Place]:
    """The last stage, the one next to it, and the first one: of alike ones between, either end of them has most."""
    chunks, whole = at.setting.chunks, _Sums.of(at.entry.all_stages)
    first, last = count(counts["first"]), count(counts["last"])
    ahead, behind = _Sums.of(first), _Sums.of(last)
    nothing = whole.less(whole)
    yield _Place(stage=last, below=whole.less(behind), above=nothing, begun=1.0 / chunks, last=True)
    if ((at.setting.breadth_first | ~at.entry.goes_on) & (chunks > 2.0)).any():
        between = (counts["total"] - counts["first"] - counts["last"]) / np.maximum(chunks - 2.0, 1.0)[..., None]
        inner = count(between)
        yield _Place(stage=inner, below=whole.less(behind, _Sums.of(inner)), above=behind, begun=2.0 / chunks)
    yield _Place(stage=first, below=nothing, above=whole.less(ahead), begun=np.ones_like(chunks))


def _in_turn(at: Rows, place: _Place, need: int) -> Iterator[Beside]:
    """The first backward of a stage, the second and the last. Those of breadth-first stages follow one another, and so
    do interleaved ones whose microbatches have all gone forward by then; else only the last ones do."""
    found, entry, setting, own = at.found, at.entry, at.setting, place.stage
    m = setting.microbatches
    apart = setting.breadth_first | ~entry.goes_on
    most = np.minimum(m * (place.below.kept + own.one_kept), np.maximum(entry.kept, entry.alone))
    scores = m * own.one_logits
    # Gradients that lie in buckets are there before any backward.
    there = found.before > found.left
    after = np.where(there, 0.0, setting.master * np.where(setting.sharded, found.share, 1.0))
    beyond = np.where(there, 0.0, found.beyond)
    done = found.before + after * place.above.made + beyond * place.above.units + found.apart * place.above.experts
    row = np.where(setting.shared, own.whole - own.stays, 0.0)
    first = Beside(
        stage=own,
        here=apart,
        kept=most,
        logits=scores,
        gradients=done,
        apart=found.apart,
        freed=setting.compute * (place.above.stays - row),
        sends=entry.all_stages.sends * np.where(setting.breadth_first, place.begun, 1.0),
        waits=entry.waits,
        sums=there,
        ends=m == 1.0,
        follows=apart if place.last else None,
    )
    second = replace(
        first,
        here=apart & (m > 1.0),
        kept=most - own.one_kept,
        logits=scores - own.one_logits,
        gradients=done + _made(at, own),
        apart=0.0,
        sums=m > 1.0,
        ends=m == 2.0,
        follows=None,
    )
    if apart.any():
        yield from (first, second)
    if need & _ENDS:
        ahead = np.where(setting.breadth_first, m, np.minimum(setting.pipeline, m))
        yield replace(
            second,
            here=np.broadcast_to(m > 1.0, apart.shape),
            kept=ahead * place.below.kept + own.one_kept,
            logits=own.one_logits,
            gradients=second.gradients
            + np.where(
                apart,
                0.0,
                after * place.below.made
                + np.where(setting.sums_whole, 0.0, beyond) * place.below.units
                + found.apart * place.below.experts
                + np.where(there, 0.0, setting.master - after) * place.below.added,
            ),
            ends=m > 1.0,
        )
