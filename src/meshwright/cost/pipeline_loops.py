"""Closed forms of schedules whose stages go round the ranks: interleaved and breadth-first."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    start, end = _before_backwards(at, at.down, at.up, down), _before_backwards(at, at.up, at.down, up)
    gains = np.where(actions > ahead + 1.0, start + end, np.maximum(start, end))
    once = enter + at.units * (at.down.total + at.up.total) + gains
    alone = (at.units == at.pipeline) & (actions <= ahead + 1.0)  # such a rank goes forward only, then backward only
    once = np.where(alone, np.maximum(once, down.whole.by_rank + up.whole.by_rank), once)
    longest = at.worst(once)
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
    return _Round(before=before, whole=_loop(at, way.last, arrived, units=at.pipeline))


def _before_backwards(at: Turned, way: Way, back: Way, done: _Round) -> FloatArray:
    """What the longest path to the end of each rank's first backward gains over entering the rank at its first forward
    and staying, shape (ranks, rows); with passes in each other's place, what it gains after the last forward.
    """
    round_before = np.where(at.chunks > 1.0, at.pipeline * (way.total - way.last), 0.0)
    arrived = done.before.first + at.around - at.across
    begun = np.maximum(done.before.by_rank, arrived + way.last_upto - way.last + at.reach)
    stayed = np.where(at.chunks > 1.0, begun, way.first_upto - way.first + at.reach)
    passes = _warm_up(at, way)
    mine = way.first_upto - way.first + at.reach + passes
    prefix = back.last_upto + at.reach
    offer = np.where(at.valid, stayed + passes - round_before + prefix, -np.inf)
    return np.asarray(np.maximum.accumulate(offer[::-1], axis=0)[::-1] - prefix - mine, dtype=np.float64)


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
    ended = _Ended(first=np.zeros_like(units), last=np.zeros_like(units), by_rank=np.zeros_like(at.rank))
    for loop in range(int(loops.max(initial=0.0))):
        stage = np.where(loop == at.chunks - 1.0, way.last, inner) if loop else way.first
        arrived = ended.after(at.around - at.across) if loop else ended
        ended = ended.where(loops > loop, _loop(at, stage, arrived, units=units))
    return ended


def _loop(at: Turned, seconds: FloatArray, before: _Ended, *, units: FloatArray) -> _Ended:
    """One stage of all ranks; `seconds` of a microbatch on each, shape (ranks, rows)."""
    first, last, by_rank = before.first, before.last, before.by_rank.copy()
    rank, reach = np.zeros_like(first) - 1.0, np.zeros_like(first)
    for own, free, place, way, valid in zip(seconds, by_rank, at.rank, at.reach, at.valid, strict=True):
        between = (place - rank - 1.0) * own + way - reach
        begun = np.maximum(first + between, free)
        left = np.maximum(begun + units * own, last + between + own)
        first, last = np.where(valid, begun + own, first), np.where(valid, left, last)
        rank, reach = np.where(valid, place, rank), np.where(valid, way, reach)
        free[:] = last
    return _Ended(first=first, last=last, by_rank=by_rank)
