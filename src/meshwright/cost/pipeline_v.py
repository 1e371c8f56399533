"""Closed forms of V schedules: each rank holds one stage on the way down the ranks and one on the way up again.

A path reaches a rank at the start of the step, stays for its work, and leaves it at the end. The first microbatch
passes a rank four times (forward down, forward up, backward down, backward up) and so does the last one; the start is
the longest way to a rank's fourth pass over ranks that either hand the microbatch on or do their own other work until
its next pass, the end the longest way on from the last microbatch's first pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.pipeline_one import to_and_fro
from meshwright.cost.pipeline_ranks import Turned, Way
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meanwhile:
    """What a rank does between the four passes of one microbatch and after them, and the third and fourth pass
    themselves; `detour` is what a path between the second and third pass gains over the ranks before. All of shape
    (ranks, rows).
    """

    down: FloatArray
    over: FloatArray
    third: FloatArray
    back: FloatArray
    fourth: FloatArray
    after: FloatArray
    detour: FloatArray


def v_shaped(at: Turned, *, paired: BoolArray) -> FloatArray:
    """Zero bubble V, or DualPipeV where `paired`, shape (rows,). For 2p - 1 microbatches or more; less is too short."""
    weights = np.where(paired, at.after.first, 0.0)
    early = np.where(paired & (at.behind == 0.0), at.down.first, 0.0)
    mate = np.where(paired, at.down.last, 0.0)
    first = _Meanwhile(
        down=2.0 * at.behind * at.down.first,
        over=at.rank * at.down.total + early,
        third=at.up.last,
        back=at.behind * (at.down.last + at.up.last + at.after.last) + at.after.last + at.down.first - early + mate,
        fourth=at.up.first + weights,
        after=np.zeros_like(at.rank),
        detour=np.zeros_like(at.rank),
    )
    ends = (_last_of_zero_bubble(at), _last_of_pairs(at))
    names = ("down", "over", "third", "back", "fourth", "after", "detour")
    last = _Meanwhile(**{name: np.where(paired, getattr(ends[1], name), getattr(ends[0], name)) for name in names})
    own = at.down.total + at.up.total + at.after.total
    start, start_three = (ended - at.down.first - _own(at, first) for ended in _start(at, first))
    end, end_three = (left - _own(at, last) for left in _end(at, last))
    ahead = 2.0 * at.pipeline - at.rank - 1.0
    enter = at.down.first_upto - at.down.first + at.reach
    alone = np.maximum(start, enter + end)
    three = np.maximum(alone, np.maximum(start_three + end, start + end_three))
    gains = np.where(at.units > ahead + 1.0, start + end, np.where(at.units > ahead, three, alone))
    once_on = at.units * own + gains
    longest = at.worst(once_on)
    once = at.down.everything + at.up.everything + 4.0 * at.across
    if at.across.any():
        way = at.down.first_upto + at.up.first_upto + 2.0 * at.reach
        slow = to_and_fro(at, once_on, way=way, own=own, ahead=ahead, units=at.units, depth=1.0)
        at_once = np.floor(at.units / (2.0 * at.pipeline)) * once  # at most 2p microbatches are under way at once
        longest = np.maximum(longest, np.maximum(slow, np.maximum(at_once, _over_the_slowest_link(at))))
    longest = np.where(paired, np.maximum(longest, _back_from_the_last_rank(at)), longest)
    both = at.units >= 2.0 * at.pipeline - 1.0
    followed = once + (at.units - 1.0) * at.worst(at.down.total + at.up.total)
    return np.where(both, longest, np.maximum(longest, followed))


def _back_from_the_last_rank(at: Turned) -> FloatArray:
    """Seconds of a path through DualPipeV that stays on the last rank until its forwards are done and comes back with
    the last microbatch but p, shape (rows,).

    The first rank then has a backward of its second stage left and those of p microbatches on its first.
    """
    last = np.argmax(np.where(at.valid, at.rank, -1.0), axis=0)
    column = np.arange(at.units.size)

    def on_last(values: FloatArray) -> FloatArray:
        return np.asarray(values[last, column], dtype=np.float64)

    stays = at.units * at.down.total + (at.units - at.pipeline) * (at.up.total + at.after.total)
    there = at.down.first_upto - at.down.first
    back = at.up.first_upto + at.after.first_upto - at.up.first - at.after.first
    left = at.up.last[0] + at.after.last[0] + at.pipeline * (at.up.first[0] + at.after.first[0])
    return np.asarray(on_last(there + stays + back) + 2.0 * at.across + left, dtype=np.float64)


def _over_the_slowest_link(at: Turned) -> FloatArray:
    """Seconds of a path that goes to and fro over the slowest link all the time, shape (rows,); nothing for fewer than
    2p - 1 microbatches.

    It comes down through all ranks and up to the link, and leaves as it came. While the ranks behind the link do
    forwards of both their stages in turn, as many of them as there are ranks before it, it takes them three second
    stages further to go to and fro once, and so at the end; else two microbatches.
    """
    hops = np.diff(at.reach, axis=0) / np.maximum(np.diff(at.rank, axis=0), 1.0)
    if not len(hops):
        return np.zeros_like(at.units)
    near, column = np.where(at.valid[1:], hops, -np.inf).argmax(axis=0), np.arange(at.units.size)

    def there(values: FloatArray) -> FloatArray:
        """On the ranks before and behind the link."""
        return np.asarray(values[near, column] + values[near + 1, column], dtype=np.float64)

    def ends(way: Way) -> FloatArray:
        behind = way.whole - way.last_upto[near, column]
        ranks = way.first_upto.max(axis=0) + behind
        return np.asarray(ranks + 2.0 * at.across - at.reach[near, column] - hops[near, column], dtype=np.float64)

    turns = np.floor((at.rank[near, column] + 1.0) / 3.0)
    times = 2.0 * turns + np.maximum(np.floor((at.units - 2.0 * turns) / 2.0), 0.0)
    each = there(at.down.last) + np.minimum(there(at.down.first), there(at.up.last)) + 2.0 * hops[near, column]
    each = np.minimum(each, there(at.up.last) + there(at.up.first) + 2.0 * hops[near, column])
    enough = at.units >= 2.0 * at.pipeline - 1.0
    return np.where(enough, ends(at.down) + ends(at.up) + times * each, 0.0)


def _own(at: Turned, own: _Meanwhile) -> FloatArray:
    """From the end of a rank's first pass to the end of what it does after the fourth."""
    return own.down + at.down.last + own.over + own.third + own.back + own.fourth + own.after


def _start(at: Turned, own: _Meanwhile) -> tuple[FloatArray, FloatArray]:
    """When each rank's fourth pass of the first microbatch ends, and when it would if ranks after its third were
    quick.
    """
    ended = at.down.first_upto + at.reach
    ended = _up(at, ended + own.down, at.down.last_upto + at.reach) + at.down.last
    ended = _down(at, ended + own.over, at.up.last_upto - at.up.last + at.reach) + at.up.last
    prefix = np.where(own.fourth > at.up.first, at.up.first_upto + at.after.first_upto, at.up.first_upto)
    return _up(at, ended + own.back, prefix + at.reach) + own.fourth, ended + own.back + own.fourth


def _end(at: Turned, own: _Meanwhile) -> tuple[FloatArray, FloatArray]:
    """From the end of each rank's first pass of the last microbatch to the end of the step, and the same if ranks
    before its second were quick.
    """
    left = _down(at, own.after, at.up.first_upto - at.up.first + at.reach)
    left = _up(at, left + own.fourth + own.back, at.up.last_upto + at.reach)
    left = _down(at, left + own.third + own.over + own.detour, at.down.last_upto - at.down.last + at.reach)
    left = left + at.down.last + own.down
    return _up(at, left, at.down.first_upto + at.reach), left


def _up(at: Turned, values: FloatArray, prefix: FloatArray) -> FloatArray:
    """The largest of a rank's value and those of later ranks with the way between, whose sums are `prefix`."""
    offer = np.where(at.valid, values + prefix, -np.inf)
    return np.where(at.valid, np.maximum.accumulate(offer[::-1], axis=0)[::-1] - prefix, 0.0)


def _down(at: Turned, values: FloatArray, before: FloatArray) -> FloatArray:
    """The largest of a rank's value and those of earlier ranks with the way between; `before` sums up to each."""
    offer = np.where(at.valid, values - before, -np.inf)
    return np.where(at.valid, np.maximum.accumulate(offer, axis=0) + before, 0.0)


def _last_of_zero_bubble(at: Turned) -> _Meanwhile:
    beside = at.up.first + at.after.first
    return _Meanwhile(
        down=(at.behind + 1.0) * beside + at.behind * (at.down.last + at.up.last + at.after.last),
        over=at.rank * at.up.total + np.where(at.rank > 0.0, at.after.last, 0.0),
        third=at.up.last,
        back=at.behind * beside + np.where(at.rank > 0.0, 0.0, at.after.last),
        fourth=at.up.first,
        after=(at.rank + 1.0) * at.after.first + at.rank * at.after.last,
        detour=np.zeros_like(at.rank),
    )


def _last_of_pairs(at: Turned) -> _Meanwhile:
    """Half of the last backwards are whole, and the weight gradients of the others come at the end."""
    up, down = at.up.first + at.after.first, at.up.last + at.after.last
    half = np.floor((at.rank + 1.0) / 2.0)
    whole = half * (at.after.first + at.after.last)
    odd = np.where((at.rank > 0.0) & (at.rank % 2.0 == 0.0), at.after.last, 0.0)
    even = 1.0 - at.rank % 2.0
    waiting = at.rank + 1.0 - half - even  # weight gradients of the second stage, each with one of the first behind it
    between = np.minimum(np.ceil(np.maximum(at.behind - even, 0.0) / 2.0), waiting)
    late = waiting - between
    rest = at.rank * at.up.total + whole + odd
    before = at.up.first_upto - at.up.first + at.after.first_upto - at.after.first
    before = before + at.up.last_upto - at.up.last + 2.0 * at.reach
    opening = np.where(at.rank > 0.0, 0.0, at.after.last)  # the first rank's last such backward is whole
    detour = np.where(at.rank > 0.0, at.earlier(before, rest + opening), 0.0)
    return _Meanwhile(
        down=(at.behind + 1.0) * down + at.behind * (at.down.last + up),
        over=up + rest,
        third=at.up.last + opening,
        back=at.behind * (at.up.first + at.after.first) + between * (at.after.last - at.after.first),
        fourth=at.up.first,
        after=(at.rank + 1.0) * at.after.first + late * (at.after.last - at.after.first),
        detour=detour,
    )
