"""Closed forms of schedules whose stages go round the ranks: interleaved and breadth-first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from meshwright.cost.pipeline_one import to_and_fro
from meshwright.cost.pipeline_ranks import Turned, Way
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray


def interleaved(at: Turned) -> FloatArray:
    """Megatron's order. A path reaches a rank's first backward through the forwards of all ranks, loop by loop, or
    through the first backwards of the ranks behind; it stays for the rank's work, or goes to and fro over slow links;
    and leaves as it came, seen backwards. A path that changes ranks between these ends is missed, up to some percent
    where ranks have their longer stages in unlike loops.
    """
    ahead = 2.0 * at.behind + (at.chunks - 1.0) * at.pipeline
    actions = at.chunks * at.units
    enter = at.down.first_upto - at.down.first + at.up.first_upto - at.up.first + 2.0 * at.reach
    down, up = _round(at, at.down), _round(at, at.up)
    start, late_start = _before_backwards(at, at.down, at.up, down)
    end, early_end = _before_backwards(at, at.up, at.down, up)
    gains = np.where(actions > ahead + 1.0, start + end, np.maximum(start, end))
    stay = enter + at.units * (at.down.total + at.up.total)
    once = stay + gains
    alone = (at.units == at.pipeline) & (actions <= ahead + 1.0)  # such a rank goes forward only, then backward only
    once = np.where(alone, np.maximum(once, down.whole.by_rank + up.whole.by_rank), once)
    longest = at.worst(np.maximum(once, stay + late_start + early_end))
    if not at.across.any():
        return longest
    steps = np.diff(at.rank, axis=0, prepend=-1.0) / at.chunks
    own = (at.down.total + at.up.total) / at.chunks
    way = np.cumsum(steps * (at.down.total + at.up.total), axis=0) + 2.0 * at.reach
    slow = to_and_fro(at, once, way=way, own=own, ahead=ahead, units=actions, depth=2.0)
    return np.maximum(longest, np.maximum(slow, _there_and_back(at, down, up)))


def _there_and_back(at: Turned, down: _Round, up: _Round) -> FloatArray:
    """Seconds of a path of two ranks that follows one microbatch through all stages and back, then another; (rows,).

    A trip from the first stage takes a rank 4 v - 1 forwards further, to its last stage, and one from there 2 v + 1, to
    its first. Between more ranks the path that goes to and fro between two of them is longer.
    """
    trip = down.whole.first + up.whole.first
    hops = at.chunks * at.across + (at.chunks - 1.0) * (at.around - at.across)
    short = at.down.whole + at.across + at.up.everything + hops
    actions = at.chunks * at.units
    pairs = np.floor((actions - 1.0) / (6.0 * at.chunks))
    rest = np.where(actions - 6.0 * at.chunks * pairs > 4.0 * at.chunks - 1.0, short, 0.0)
    return np.where(at.pipeline == 2.0, pairs * (trip + short) + rest, 0.0) + trip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The first round of microbatches through all stages of a rank but the last, and through all."""

    before: _Ended
    whole: _Ended


def _round(at: Turned, way: Way) -> _Round:
    before = _looped(at, way, units=at.pipeline, loops=at.chunks - 1.0)
    arrived = before.where(at.chunks > 1.0, before.after(at.around - at.across))
    return _Round(before=before, whole=_Loop.of(at, way.last, units=at.pipeline).after(arrived))


def _before_backwards(at: Turned, way: Way, back: Way, done: _Round) -> tuple[FloatArray, FloatArray]:
    """What the longest path to the end of each rank's first backward gains over entering the rank at its first forward
    and staying, and what it gains where it may come around a round later too, both of shape (ranks, rows); with passes
    in each other's place, what it gains after the last forward.
    """
    round_before = np.where(at.chunks > 1.0, at.pipeline * (way.total - way.last), 0.0)
    arrived = done.before.first + at.around - at.across
    begun = np.maximum(done.before.by_rank, arrived + way.last_upto - way.last + at.reach)
    stayed = np.where(at.chunks > 1.0, begun, way.first_upto - way.first + at.reach)
    passes = _warm_up(at, way)
    mine = way.first_upto - way.first + at.reach + passes
    prefix = back.last_upto + at.reach
    offer = np.where(at.valid, stayed + passes - round_before + prefix, -np.inf)
    best = np.maximum.accumulate(offer[::-1], axis=0)[::-1]
    around = _around(at, way, back, begun=best - prefix + back.last) - mine - back.last
    gains = best - prefix - mine
    later = np.where((at.chunks > 1.0) & (at.units >= 3.0 * at.pipeline), np.maximum(gains, around), -np.inf)
    return gains, later


def _around(at: Turned, way: Way, back: Way, *, begun: FloatArray) -> FloatArray:
    """When each rank's first backward would have ended, had it to do all that comes before the forward that the last
    rank hands around to it first after a round of backwards of its own; shape (ranks, rows).

    `begun` is when the first backward of each rank ends. That forward is of the second round's first microbatch.
    """
    inner = (way.total - way.first - way.last) / np.maximum(at.chunks - 2.0, 1.0)
    second, before = np.where(at.chunks > 2.0, inner, way.last), (back.total - back.first - back.last)
    before = np.where(at.chunks > 2.0, before / np.maximum(at.chunks - 2.0, 1.0), back.first)
    steps = np.diff(at.rank, axis=0, prepend=-1.0)
    last = np.where(at.behind == 0.0, begun + (at.pipeline - 1.0) * (way.last + back.last) + way.first, -np.inf)
    came = last.max(axis=0) + at.around - at.across + np.cumsum(steps * second, axis=0) + at.reach
    slots = 2.0 * at.rank + 1.0
    forwards = np.minimum(slots, at.pipeline) * way.first + np.maximum(slots - at.pipeline, 0.0) * way.last
    few = np.minimum(slots, at.pipeline - 1.0)
    return np.asarray(came - forwards - few * back.last - (slots - few) * before - second, dtype=np.float64)


def _warm_up(at: Turned, seconds: Way) -> FloatArray:
    """Seconds of a rank's passes before its first backward (or the mirror image at the end)."""
    extra = 2.0 * at.behind + 1.0
    mixed = at.pipeline * (seconds.total - seconds.last)
    mixed = mixed + np.minimum(extra, at.pipeline) * seconds.last
    mixed = mixed + np.maximum(extra - at.pipeline, 0.0) * seconds.first
    return np.minimum(mixed, at.units * seconds.total)


def breadth_first(at: Turned) -> FloatArray:
    """All forwards, then all backwards, which are their mirror image: nothing goes up before all has come down."""
    return _swept(at, at.down) + _swept(at, at.up)


def _swept(at: Turned, way: Way) -> FloatArray:
    """Seconds of every microbatch through every stage, a stage of all ranks after the other, shape (rows,)."""
    return _looped(at, way, units=at.units, loops=at.chunks).last


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """When the first and the last microbatch leave the last rank, shape (rows,), and the last one each rank, shape
    (ranks, rows).
    """

    first: FloatArray
    last: FloatArray
    by_rank: FloatArray

    def after(self, seconds: FloatArray) -> _Ended:
        """That the last rank's outputs arrive so much later."""
        return replace(self, first=self.first + seconds, last=self.last + seconds)

    def where(self, chosen: BoolArray, then: _Ended) -> _Ended:
        """`then` in the chosen rows."""
        names = ("first", "last", "by_rank")
        return _Ended(**{name: np.where(chosen, getattr(then, name), getattr(self, name)) for name in names})


def _looped(at: Turned, way: Way, *, units: FloatArray, loops: FloatArray) -> _Ended:
    """The ends of the first `loops` stages of every rank, of so many microbatches each; both of shape (rows,).

    Microbatches leave a rank in times that are convex in their number, whatever the ranks before did, so that the
    first one's and the last one's tell all; and along a run of equal ranks the ends tell all. Exact where stages
    between a rank's first and last are alike.
    """
    inner = (way.total - way.first - way.last) / np.maximum(at.chunks - 2.0, 1.0)
    first, between, last = (_Loop.of(at, seconds, units=units) for seconds in (way.first, inner, way.last))
    found = ended = _Ended(first=np.zeros_like(units), last=np.zeros_like(units), by_rank=np.zeros_like(at.rank))
    for loop in range(int(loops.max(initial=0.0))):
        ends = at.chunks - 1.0 == loop
        stage = (between.where(ends, last) if ends.any() else between) if loop else first
        ended = stage.after(ended.after(at.around - at.across) if loop else ended)
        done = loops == loop + 1.0
        found = found.where(done, ended) if done.any() else found
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """One stage of all ranks, each of shape (ranks, rows): `upto` the seconds of a microbatch from the first rank's
    start to each one's end, `alone` a rank's seconds without the way to it, and `others` those of all microbatches but
    one without that way; both minus infinity where there is no rank."""

    upto: FloatArray
    alone: FloatArray
    others: FloatArray

    @classmethod
    def of(cls, at: Turned, seconds: FloatArray, *, units: FloatArray) -> _Loop:
        """Of `seconds` of a microbatch on each rank shown; those between are as the next one shown."""
        steps, ways = np.diff(at.rank, axis=0, prepend=-1.0), np.diff(at.reach, axis=0, prepend=0.0)
        upto = np.cumsum(np.where(at.valid, steps * seconds + ways, 0.0), axis=0)
        alone, others = seconds - upto, (units - 1.0) * seconds - upto
        return cls(
            upto=upto,
            alone=np.where(at.valid, alone, -np.inf),
            others=np.where(at.valid, others, -np.inf),
        )

    def where(self, chosen: BoolArray, then: _Loop) -> _Loop:
        """`then` in the chosen rows."""
        names = ("upto", "alone", "others")
        return _Loop(**{name: np.where(chosen, getattr(then, name), getattr(self, name)) for name in names})

    def after(self, before: _Ended) -> _Ended:
        """When it ends: a rank begins when it is free and the microbatch has come."""
        first = self.upto + np.maximum(before.first, _most_upto(before.by_rank + self.alone))
        by_rank = self.upto + np.maximum(before.last, _most_upto(first + self.others))
        return _Ended(first=first[-1], last=by_rank[-1], by_rank=by_rank)


def _most_upto(values: FloatArray) -> FloatArray:
    """The largest of the ranks up to each one, written over `values` (ranks, rows): numpy's own accumulates down short
    columns more slowly."""
    for before, own in pairwise(values):
        np.maximum(before, own, out=own)
    return values
