"""Closed forms of V schedules: each rank holds one stage on the way down the ranks and one on the way up again.

A path enters a rank, stays for its work and leaves to the rank that ends last. At the start and at the end it may go
with one microbatch to other ranks and back wherever the rank itself does less meanwhile: down to later ranks between
the forwards of its two stages and between their backwards, up to the first one in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.pipeline_ranks import Turned
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meanwhile:
    """What a rank does in turn between passes of one microbatch, (ranks, rows): from its first forward to its second,
    to its first backward, to its second, and after that when the microbatch is the last one.
    """

    down: FloatArray
    over: FloatArray
    back: FloatArray
    after: FloatArray


def v_shaped(at: Turned, *, paired: BoolArray) -> FloatArray:
    """Zero bubble V, or DualPipeV where `paired`, shape (rows,)."""
    first = _Meanwhile(
        down=2.0 * at.behind * at.down.first,
        over=at.rank * at.down.total,
        back=at.behind * (at.down.last + at.up.last + at.after.last) + at.after.last + at.down.first,
        after=np.zeros_like(at.rank),
    )
    ends = [_last_of_zero_bubble(at), _last_of_pairs(at)]
    names = ("down", "over", "back", "after")
    last = _Meanwhile(**{name: np.where(paired, getattr(ends[1], name), getattr(ends[0], name)) for name in names})
    enter = at.down.first_upto - at.down.first + at.reach
    busy = at.units * (at.down.total + at.up.total + at.after.total)
    leave = at.earlier(at.up.first_upto - at.up.first + at.reach, last.after)
    start, end = _detours(at, first), _detours(at, last)
    both = at.units >= 2.0 * at.pipeline - 1.0
    longest = at.worst(enter + busy + leave + np.where(both, start + end, np.maximum(start, end)))
    passing = at.worst(at.down.total + at.up.total)
    once = at.down.everything + at.up.everything + 4.0 * at.across + (at.units - 1.0) * passing
    return np.where(both, longest, np.maximum(longest, once))


def _detours(at: Turned, own: _Meanwhile) -> FloatArray:
    downs = at.down.first_upto + at.down.last_upto + 2.0 * at.reach
    ups = at.up.first_upto + at.up.last_upto + 2.0 * at.reach
    over = at.down.last_upto - at.down.last + at.up.last_upto - at.up.last + 2.0 * at.reach
    return at.later(downs, own.down) + at.earlier(over, own.over) + at.later(ups, own.back)


def _last_of_zero_bubble(at: Turned) -> _Meanwhile:
    beside = at.up.first + at.after.first
    return _Meanwhile(
        down=(at.behind + 1.0) * beside + at.behind * (at.down.last + at.up.last + at.after.last),
        over=at.rank * at.up.total + np.where(at.rank > 0.0, at.after.last, 0.0),
        back=at.behind * beside,
        after=(at.rank + 1.0) * at.after.first + at.rank * at.after.last,
    )


def _last_of_pairs(at: Turned) -> _Meanwhile:
    """Half of the last backwards are whole, and the weight gradients of the others come at the end."""
    up, down = at.up.first + at.after.first, at.up.last + at.after.last
    half = np.floor((at.rank + 1.0) / 2.0)
    whole = half * (at.after.first + at.after.last)
    odd = np.where((at.rank > 0.0) & (at.rank % 2.0 == 0.0), at.after.last, 0.0)
    late = np.minimum(at.behind, at.rank + 1.0)
    mixed = 0.5 * (at.after.first + at.after.last)
    return _Meanwhile(
        down=(at.behind + 1.0) * down + at.behind * (at.down.last + up),
        over=up + at.rank * at.up.total + whole + odd,
        back=at.behind * (at.up.first + np.minimum(at.after.first, at.after.last)),
        after=late * at.after.first + (at.rank + 1.0 - late) * mixed,
    )
