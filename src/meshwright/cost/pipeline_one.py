"""Closed forms of schedules with one stage a rank: gpipe, 1f1b and its slices, zero bubble H1 and H2."""

from __future__ import annotations

import numpy as np

from meshwright.cost.pipeline_ranks import Turned
from meshwright.cost.work import FloatArray

_STEPS = 3  # of an iteration that converges faster than linearly
SLOW = 0.02  # of a unit's work, that a link takes longer than where paths go to and fro over it


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
    ahead = depth * at.behind + at.slices - 1.0
    warm = np.minimum(ahead, others)
    lag = np.minimum(depth * at.rank, at.units)
    enter = at.down.first_upto - f + at.reach
    back = at.up.first_upto - i + at.reach
    way = at.down.first_upto + at.up.first_upto + 2.0 * at.reach
    spare = np.minimum(at.slices - 1.0, others)  # that all ranks do first, so that a path may do them before it leaves
    start = np.maximum(at.later(way, warm * f), at.later(way, (warm - spare) * f))
    start = np.maximum(start, warm * (np.maximum.accumulate(f, axis=0) - f))
    every = at.valid & (ahead >= others)  # forward before it goes backward: the last one may go on to another such rank
    beyond = np.maximum.accumulate(np.where(every, way, -np.inf)[::-1], axis=0)[::-1]
    start = np.where(every, np.maximum(start, beyond - way), start)
    cool = warm * i + np.minimum(warm, np.maximum(others - lag, 0.0)) * w
    end = np.maximum(at.later(way, cool), at.later(way, cool - spare * i))
    middle = at.later(way, depth * at.behind * (f + i + w))
    rounds = np.maximum(np.floor((others - at.slices + 1.0) / (depth * at.behind + 1.0)) - 1.0, 0.0)
    leave = at.earlier(back, np.minimum(lag + 1.0, at.units) * w)
    queue = leave + warm * (np.maximum.accumulate(i + w, axis=0) - i - w)
    apart = others > ahead
    stay = enter + at.units * (f + i + w)
    tail = np.maximum(end + leave, queue)
    once = stay + np.where(apart, start + tail, np.maximum(start + leave, tail))
    longest = at.worst(once + np.where(apart, rounds * middle, 0.0))
    if not at.across.any():
        return longest
    slow = to_and_fro(at, once, way=way, own=f + i + w, ahead=ahead, units=at.units, depth=depth)
    return np.maximum(longest, slow)


def to_and_fro(
    at: Turned,
    once: FloatArray,
    *,
    way: FloatArray,
    own: FloatArray,
    ahead: FloatArray,
    units: FloatArray,
    depth: FloatArray | float,
) -> FloatArray:
    """Seconds of the path that goes to and fro between two ranks all the time, as slow links demand; shape (rows,),
    nothing where the slowest link takes a fiftieth of a unit's work or less.

    A rank starts with `ahead` forwards, then does one forward and one backward in turn, `units` of each in all. One
    that has handed a forward on to another `d` ranks behind, and waits for the backward which that one does next, has
    advanced by `depth` d + 1 of them. Of all such cycles the one of most seconds a unit is found by Dinkelbach's
    iteration (1967); a path may begin and end on either rank. `once` are the seconds of the path that stays on each
    rank, `own` a unit's there, `way` the sum of both passes and transfers from rank 0, all of shape (ranks, rows).
    """
    found: FloatArray = np.zeros(units.size)
    own = np.where(at.valid, own, 0.0)
    rows = np.flatnonzero(at.around - at.across > SLOW * own.max(axis=0))
    if not rows.size:
        return found
    column, rank, valid = np.arange(rows.size), at.rank[:, rows], at.valid[:, rows]
    own, forth = own[:, rows], np.where(valid, way[:, rows], -np.inf)
    back, place = np.where(valid, own - way[:, rows], -np.inf), np.broadcast_to(depth, units.shape)[rows] * rank
    pace = own.max(axis=0)
    for _ in range(_STEPS):
        reached = forth - pace * place
        best = np.maximum.accumulate(reached[::-1], axis=0)[::-1] + back + pace * place
        near = best.argmax(axis=0)
        far = np.where(rank >= rank[near, column], reached, -np.inf).argmax(axis=0)
        count = place[far, column] - place[near, column] + 1.0
        cycle = forth[far, column] + back[near, column]
        pace = cycle / count
    cycles = np.floor((units[rows] - 2.0 - ahead[near, rows]) / count)
    for rank_of_path, times in ((near, cycles), (far, cycles + 1.0)):
        gains = np.maximum(times, 0.0) * (cycle - count * own[rank_of_path, column])
        found[rows] = np.maximum(found[rows], once[rank_of_path, rows] + gains)
    return found
