"""Closed forms of schedules with one stage a rank: gpipe, 1f1b and its slices, zero bubble H1 and H2."""

from __future__ import annotations

import numpy as np

from meshwright.cost.pipeline_ranks import Turned
from meshwright.cost.work import FloatArray


def filled(at: Turned) -> FloatArray:
    """gpipe: one microbatch through every stage, and the slowest forward and backward for each of the others."""
    slowest = at.worst(at.down.total) + at.worst(at.up.total + at.after.total)
    once = at.down.everything + at.up.everything + at.after.everything
    return np.asarray(once + 2.0 * at.across + (at.units - 1.0) * slowest, dtype=np.float64)


def one_for_one(at: Turned, *, depth: FloatArray) -> FloatArray:
    """1f1b, where weight gradients are part of the backward (`at.after` is nothing and `depth` 1), H1 (1) and H2 (2).

    A path enters a rank through the forwards of those before, stays for its work, and leaves through the backwards
    of those before, ending with the weight gradients that one of them puts off. At the start and at the end it may
    queue at an earlier, slower rank, or detour through later ranks and skip the rank's own warm-up or cool-down.
    """
    f, i, w = at.down.total, at.up.total, at.after.total
    others = at.units - 1.0
    warm = np.minimum(depth * at.behind, others)
    lag = np.minimum(depth * at.rank, at.units)
    enter = at.down.first_upto - f + at.reach
    back = at.up.first_upto - i + at.reach
    way = at.down.first_upto + at.up.first_upto + 2.0 * at.reach
    start = at.later(way, warm * f)
    start = np.maximum(start, warm * (np.maximum.accumulate(f, axis=0) - f))
    cool = warm * i + np.minimum(warm, np.maximum(others - lag, 0.0)) * w
    end = at.later(way, cool)
    middle = at.later(way, depth * at.behind * (f + i + w))
    rounds = np.maximum(np.floor(others / (depth * at.behind + 1.0)) - 1.0, 0.0)
    leave = at.earlier(back, np.minimum(lag + 1.0, at.units) * w)
    queue = leave + warm * (np.maximum.accumulate(i + w, axis=0) - i - w)
    apart = at.units > depth * at.behind + 1.0
    stay = enter + at.units * (f + i + w)
    tail = np.maximum(end + leave, queue)
    detours = np.where(apart, start + tail + rounds * middle, np.maximum(start + leave, tail))
    return at.worst(stay + detours)
