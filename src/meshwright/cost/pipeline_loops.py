"""Closed forms of schedules whose stages go round the ranks: interleaved and breadth-first."""

from __future__ import annotations

import numpy as np

from meshwright.cost.pipeline_ranks import Turned, Way
from meshwright.cost.work import FloatArray


def interleaved(at: Turned) -> FloatArray:
    """Megatron's order. A path enters a bottleneck rank through the first stages and leaves through them again; at
    the start and the end it may queue at an earlier, slower rank, or go through all later stages instead of the rank's
    own warm-up or cool-down. Where links are slow, it goes round and round.
    """
    busy = at.down.total + at.up.total
    enter = at.down.first_upto - at.down.first + at.up.first_upto - at.up.first + 2.0 * at.reach
    stay = enter + at.units * busy
    warm_up, cool_down = _warm_up(at, at.down), _warm_up(at, at.up)
    start = at.later(at.down.first_upto + at.up.last_upto + 2.0 * at.reach, warm_up)
    end = at.later(at.down.last_upto + at.up.first_upto + 2.0 * at.reach, cool_down)
    queue = at.pipeline - 1.0
    start = np.maximum(start, queue * (np.maximum.accumulate(at.down.first, axis=0) - at.down.first))
    end = np.maximum(end, queue * (np.maximum.accumulate(at.up.first, axis=0) - at.up.first))
    hops = 2.0 * (at.across - at.reach) + (at.chunks - 1.0) * at.around
    through_start = at.down.everything - at.down.first_upto + at.up.whole - at.up.last_upto + hops - warm_up
    through_end = at.up.everything - at.up.first_upto + at.down.whole - at.down.last_upto + hops - cool_down
    start, end = np.maximum(start, through_start), np.maximum(end, through_end)
    both = at.units >= 2.0 * at.pipeline
    longest = at.worst(stay + np.where(both, start + end, np.maximum(start, end)))
    once = at.down.everything + at.up.everything
    once = once + 2.0 * (at.chunks * at.across + (at.chunks - 1.0) * (at.around - at.across))
    whole = once + (at.units - 1.0) * at.worst(at.down.last + at.up.last)
    longest = np.maximum(longest, np.maximum(_returned(at, at.down), _returned(at, at.up)))
    return np.where(both, longest, np.maximum(longest, whole))


def _returned(at: Turned, way: Way) -> FloatArray:
    """Seconds of a path that goes round all ranks for every chunk but one of every round of microbatches.

    A rank has a round's next chunk when the round has come back to it, which slow links between ranks put off.
    """
    rounds = np.maximum(at.units / at.pipeline, 1.0)
    return rounds * (at.chunks - 1.0) * (way.everything / at.chunks + at.around)


def _warm_up(at: Turned, seconds: Way) -> FloatArray:
    """Seconds of the passes between a rank's first forward and its first backward (or the mirror image at the end)."""
    extra = 2.0 * at.behind + 1.0
    mixed = at.pipeline * (seconds.total - seconds.last)
    mixed = mixed + np.minimum(extra, at.pipeline) * seconds.last
    mixed = mixed + np.maximum(extra - at.pipeline, 0.0) * seconds.first
    return np.minimum(mixed, at.units * seconds.total) - seconds.first


def breadth_first(at: Turned) -> FloatArray:
    """All forwards, then all backwards, which are their mirror image: nothing goes up before all has come down."""
    return _swept(at, at.down) + _swept(at, at.up)


def _swept(at: Turned, way: Way) -> FloatArray:
    """Seconds of every microbatch through every stage: the path stays on one rank, or on one for its first or last
    stage and on another for the rest, or follows the first microbatch where those are few.
    """
    enter, leave = way.first_upto - way.first, way.whole - way.last_upto
    others = at.units - 1.0
    stay = at.worst(enter + at.units * way.total + leave)
    rest = at.units * (way.total - way.last)
    before = np.maximum.accumulate(np.where(at.valid, enter + rest - way.last_upto + way.last, -np.inf), axis=0)
    last = at.worst(before + others * way.last) + way.whole
    rest = at.units * (way.total - way.first)
    before = np.maximum.accumulate(np.where(at.valid, others * way.first, -np.inf), axis=0)
    first = at.worst(before + way.first_upto + rest + leave)
    widest = np.maximum(way.first, way.last)
    inner = (way.total - way.first - way.last) / np.maximum(at.chunks - 2.0, 1.0)
    widest = at.worst(np.maximum(widest, np.where(at.chunks > 2.0, inner, 0.0)))
    hops = at.chunks * at.across + (at.chunks - 1.0) * (at.around - at.across)
    followed = way.everything + hops + others * widest
    stayed = np.maximum(stay, np.where(at.chunks > 1.0, np.maximum(first, last), stay)) + at.across
    return np.asarray(np.maximum(stayed, followed), dtype=np.float64)
