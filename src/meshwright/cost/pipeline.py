"""Closed forms of a pipeline's makespan and of its activations in flight, with stages as uneven as they are.

The makespan is the longest path through the schedule. Every path that matters enters a bottleneck rank through the
first stages, stays there for its work, and leaves through the first stages again; at the start and at the end it may
detour through later ranks and skip the bottleneck's own warm-up or cool-down. Exact for gpipe, and for 1f1b without
transfers but for pathological stages; tests hold it against the event simulation.
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
    microbatches = shape.microbatches[:, None]
    busy = np.where(shape.valid, forward.total + backward.total, 0.0)
    enter = forward.first_upto - forward.first + backward.first_upto - backward.first
    enter = enter + 2.0 * reach
    stay = np.where(shape.valid, enter + microbatches * busy, 0.0)
    warm_up = _warm_up(shape, forward)
    cool_down = _warm_up(shape, backward)
    detour = _detours(shape, forward, backward, reach)
    start = _largest(detour.start + warm_up[:, None, :], warm_up)
    end = _largest(detour.end + cool_down[:, None, :], cool_down)
    start = np.maximum(start, detour.through_start - warm_up)
    end = np.maximum(end, detour.through_end - cool_down)
    middle = np.maximum(_largest(detour.middle, np.zeros_like(warm_up)), 0.0)
    count = shape.pipeline[:, None] - 1.0 - shape.rank
    rounds = np.where(_mask(shape, _INTERLEAVED), 0.0, np.floor((microbatches - 1.0) / (count + 1.0)) - 1.0)
    both = np.where(
        _mask(shape, _INTERLEAVED), microbatches >= 2.0 * shape.pipeline[:, None], microbatches > count + 1.0
    )
    path = stay + np.where(both, start + end + np.maximum(rounds, 0.0) * middle, np.maximum(start, end))
    longest = np.where(shape.valid, path, 0.0).max(axis=1)
    return np.where(shape.schedule == _GPIPE, _gpipe(shape, forward, backward, reach), longest)


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
    return np.where(_mask(shape, _INTERLEAVED) & (shape.chunks[:, None] > 1.0), mixed, plain)


def _mask(shape: Shape, kind: int) -> BoolArray:
    return np.asarray(shape.schedule == kind)[:, None]


def _warm_up(shape: Shape, seconds: RankSeconds) -> FloatArray:
    """Seconds of the passes between a rank's first forward and its first backward (or the mirror image at the end)."""
    behind = shape.pipeline[:, None] - 1.0 - shape.rank
    plain = np.minimum(behind, shape.microbatches[:, None] - 1.0) * seconds.total
    pipeline = shape.pipeline[:, None]
    extra = 2.0 * behind
    mixed = pipeline * (seconds.total - seconds.last)
    mixed = mixed + np.minimum(extra, pipeline) * seconds.last + np.maximum(extra - pipeline, 0.0) * seconds.first
    mixed = np.minimum(mixed, shape.microbatches[:, None] * seconds.total - seconds.first)
    return np.where(_mask(shape, _INTERLEAVED), mixed, plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Detours:
    """Seconds of a way from rank j (axis 1) to rank l (axis 2) and back; `through_*` over every stage, (rows, j)."""

    start: FloatArray
    end: FloatArray
    middle: FloatArray
    through_start: FloatArray
    through_end: FloatArray


def _detours(shape: Shape, forward: RankSeconds, backward: RankSeconds, reach: FloatArray) -> _Detours:
    rank = shape.rank.astype(np.float64)
    late = np.where(shape.valid[:, None, :] & (rank[:, None, :] >= rank[:, :, None]), 0.0, -np.inf)

    def way(down: FloatArray, up: FloatArray) -> FloatArray:
        prefix = down + up + 2.0 * reach
        return prefix[:, None, :] - prefix[:, :, None] + late

    count = shape.pipeline[:, None] - 1.0 - rank
    busy = forward.total + backward.total
    middle = way(forward.last_upto, backward.last_upto)
    wait = count * busy
    middle = middle + wait[:, None, :] - wait[:, :, None]
    across = np.where(shape.valid, reach, 0.0).max(axis=1)[:, None]
    around = across * shape.pipeline[:, None] / np.maximum(shape.pipeline[:, None] - 1.0, 1.0)
    hops = 2.0 * (across - reach) + (shape.chunks[:, None] - 1.0) * around
    ends_forward, ends_backward = _whole(forward), _whole(backward)
    through_start = (
        forward.everything[:, None] - forward.first_upto + ends_backward[:, None] - backward.last_upto + hops
    )
    through_end = backward.everything[:, None] - backward.first_upto + ends_forward[:, None] - forward.last_upto + hops
    interleaved = _mask(shape, _INTERLEAVED)
    return _Detours(
        start=way(forward.first_upto, backward.last_upto),
        end=way(forward.last_upto, backward.first_upto),
        middle=middle,
        through_start=np.where(interleaved, through_start, -np.inf),
        through_end=np.where(interleaved, through_end, -np.inf),
    )


def _whole(seconds: RankSeconds) -> FloatArray:
    """The sum of the last stages over all ranks: the prefix at the last rank shown, which is always the last rank."""
    return np.asarray(seconds.last_upto.max(axis=1), dtype=np.float64)


def _largest(ways: FloatArray, own: FloatArray) -> FloatArray:
    """The gain of the best way over staying, at least nothing: shape (rows, j)."""
    return np.asarray(np.maximum(ways.max(axis=2) - own, 0.0), dtype=np.float64)


def _gpipe(shape: Shape, forward: RankSeconds, backward: RankSeconds, reach: FloatArray) -> FloatArray:
    """Exact: fill, the slowest forward of every other microbatch, drain, the slowest backward of every other one."""
    slowest = np.where(shape.valid, forward.total, 0.0).max(axis=1)
    slowest = slowest + np.where(shape.valid, backward.total, 0.0).max(axis=1)
    once = forward.everything + backward.everything + 2.0 * np.where(shape.valid, reach, 0.0).max(axis=1)
    return np.asarray(once + (shape.microbatches - 1.0) * slowest, dtype=np.float64)
