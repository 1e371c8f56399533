"""Closed forms of a pipeline's makespan and of its activations in flight, with stages as uneven as they are.

The makespan is the longest path through the schedule. Every path that matters enters a bottleneck rank through the
first stages, stays there for its work, and leaves through the first stages again. At the start and at the end it may
queue at an earlier, slower rank, or detour through later ranks and skip the bottleneck's own warm-up or cool-down.
Exact for gpipe and for 1f1b without transfers; tests hold all of it against the event simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.table import SCHEDULES, BoolArray, IntArray
from meshwright.cost.work import FloatArray
from meshwright.spec.plan import ScheduleKind

_GPIPE = SCHEDULES.index(ScheduleKind.GPIPE)
_INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one microbatch by pass on every rank shown, shape (rows, ranks).

    `total` over the rank's stages, `first` and `last` on its first and last one, `first_upto` and `last_upto` summed
    over all ranks up to and with this one; `everything` over all stages, shape (rows,).
    """

    total: FloatArray
    first: FloatArray
    last: FloatArray
    first_upto: FloatArray
    last_upto: FloatArray
    everything: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Schedule and position of every row: `rank` and `valid` have shape (rows, ranks), the rest (rows,)."""

    schedule: IntArray
    pipeline: FloatArray
    chunks: FloatArray
    microbatches: FloatArray
    rank: IntArray
    valid: BoolArray


def makespan(shape: Shape, *, forward: RankSeconds, backward: RankSeconds, reach: FloatArray) -> FloatArray:
    """Seconds from the first forward to the last backward, shape (rows,).

    `reach` is the transfer seconds one way from rank 0 to each rank shown, shape (rows, ranks).
    """
    at = _Turned.of(shape, forward, backward, reach)
    interleaved = shape.schedule == _INTERLEAVED
    busy = at.down.total + at.up.total
    enter = at.down.first_upto - at.down.first + at.up.first_upto - at.up.first + 2.0 * at.reach
    stay = enter + shape.microbatches * busy
    warm_up, cool_down = _warm_up(shape, at, at.down), _warm_up(shape, at, at.up)
    start = _gain(at, at.down.first_upto + at.up.last_upto + 2.0 * at.reach, warm_up)
    end = _gain(at, at.down.last_upto + at.up.first_upto + 2.0 * at.reach, cool_down)
    queue = np.where(interleaved, shape.pipeline - 1.0, np.minimum(at.behind, shape.microbatches - 1.0))
    start = np.maximum(start, queue * (np.maximum.accumulate(at.down.first, axis=0) - at.down.first))
    end = np.maximum(end, queue * (np.maximum.accumulate(at.up.first, axis=0) - at.up.first))
    wait = at.behind * busy
    middle = _gain(at, at.down.first_upto + at.up.first_upto + 2.0 * at.reach, wait)
    rounds = np.where(interleaved, 0.0, np.floor((shape.microbatches - 1.0) / (at.behind + 1.0)) - 1.0)
    both = np.where(interleaved, shape.microbatches >= 2.0 * shape.pipeline, shape.microbatches > at.behind + 1.0)
    if interleaved.any():
        hops = 2.0 * (at.across - at.reach) + (shape.chunks - 1.0) * at.around
        through_start = forward.everything - at.down.first_upto + at.up.whole - at.up.last_upto + hops - warm_up
        through_end = backward.everything - at.up.first_upto + at.down.whole - at.down.last_upto + hops - cool_down
        start = np.where(interleaved, np.maximum(start, through_start), start)
        end = np.where(interleaved, np.maximum(end, through_end), end)
    path = stay + np.where(both, start + end + np.maximum(rounds, 0.0) * middle, np.maximum(start, end))
    longest = np.where(at.valid, path, 0.0).max(axis=0)
    once = forward.everything + backward.everything
    last = np.where(at.valid, at.down.last + at.up.last, 0.0).max(axis=0)
    whole = once + 2.0 * (shape.chunks * at.across + (shape.chunks - 1.0) * (at.around - at.across))
    whole = whole + (shape.microbatches - 1.0) * last
    longest = np.where(interleaved & ~both[0], np.maximum(longest, whole), longest)
    slowest = np.where(at.valid, at.down.total, 0.0).max(axis=0) + np.where(at.valid, at.up.total, 0.0).max(axis=0)
    gpipe = once + 2.0 * at.across + (shape.microbatches - 1.0) * slowest
    return np.asarray(np.where(shape.schedule == _GPIPE, gpipe, longest), dtype=np.float64)


def held(shape: Shape, *, first: FloatArray, last: FloatArray, total: FloatArray) -> FloatArray:
    """The most that a rank holds at once of what each microbatch leaves on its stages; all of shape (rows, ranks).

    gpipe holds every microbatch, 1f1b p - rank of them, interleaved what Megatron's warm-up starts.
    """
    microbatches = shape.microbatches[:, None]
    behind = shape.pipeline[:, None] - shape.rank
    plain = np.where(_mask(shape, _GPIPE), microbatches, np.minimum(behind, microbatches)) * total
    pipeline = shape.pipeline[:, None]
    extra = 2.0 * (behind - 1.0) + 1.0
    mixed = pipeline * (total - last) + np.minimum(extra, pipeline) * last + np.maximum(extra - pipeline, 0.0) * first
    mixed = np.minimum(mixed, microbatches * total)
    return np.where(_mask(shape, _INTERLEAVED), mixed, plain)


def _mask(shape: Shape, kind: int) -> BoolArray:
    return np.asarray(shape.schedule == kind)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """RankSeconds with ranks first, shape (ranks, rows), and the sum of the last stages over all ranks (rows,)."""

    total: FloatArray
    first: FloatArray
    last: FloatArray
    first_upto: FloatArray
    last_upto: FloatArray
    whole: FloatArray

    @classmethod
    def of(cls, seconds: RankSeconds) -> _Way:
        turned = [
            np.ascontiguousarray(array.T)
            for array in (seconds.total, seconds.first, seconds.last, seconds.first_upto, seconds.last_upto)
        ]
        names = ("total", "first", "last", "first_upto", "last_upto")
        return cls(**dict(zip(names, turned, strict=True)), whole=turned[-1].max(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turned:
    """What the makespan reads, ranks first: numpy reduces the first dim of a long array fastest.

    `behind` ranks come after each; `across` is the way from the first rank to the last, `around` back to the first.
    """

    down: _Way
    up: _Way
    rank: FloatArray
    behind: FloatArray
    valid: BoolArray
    reach: FloatArray
    across: FloatArray
    around: FloatArray

    @classmethod
    def of(cls, shape: Shape, forward: RankSeconds, backward: RankSeconds, reach: FloatArray) -> _Turned:
        rank = np.ascontiguousarray(shape.rank.T.astype(np.float64))
        valid = np.ascontiguousarray(shape.valid.T)
        turned = np.ascontiguousarray(reach.T)
        across = np.where(valid, turned, 0.0).max(axis=0)
        return cls(
            down=_Way.of(forward),
            up=_Way.of(backward),
            rank=rank,
            behind=shape.pipeline - 1.0 - rank,
            valid=valid,
            reach=turned,
            across=across,
            around=across * shape.pipeline / np.maximum(shape.pipeline - 1.0, 1.0),
        )


def _warm_up(shape: Shape, at: _Turned, seconds: _Way) -> FloatArray:
    """Seconds of the passes between a rank's first forward and its first backward (or the mirror image at the end)."""
    plain = np.minimum(at.behind, shape.microbatches - 1.0) * seconds.total
    extra = 2.0 * at.behind + 1.0
    mixed = shape.pipeline * (seconds.total - seconds.last)
    mixed = mixed + np.minimum(extra, shape.pipeline) * seconds.last
    mixed = mixed + np.maximum(extra - shape.pipeline, 0.0) * seconds.first
    mixed = np.minimum(mixed, shape.microbatches * seconds.total) - seconds.first
    return np.where(shape.schedule == _INTERLEAVED, mixed, plain)


def _gain(at: _Turned, prefix: FloatArray, own: FloatArray) -> FloatArray:
    """What the best detour from each rank through a later one gains over staying; at least nothing, (ranks, rows).

    `prefix` sums the way there and back from rank 0, `own` is what a rank does meanwhile if the path stays on it.
    """
    offer = np.where(at.valid, prefix + own, -np.inf)
    later = np.maximum.accumulate(offer[::-1], axis=0)[::-1]
    return np.maximum(later - prefix - own, 0.0)
