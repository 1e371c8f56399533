"""Closed forms of a pipeline's makespan and of its activations in flight, with stages as uneven as they are.

The makespan is the longest path through the schedule; each form takes the longest of a few kinds of path.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.cost.pipeline_loops import breadth_first, interleaved
from meshwright.cost.pipeline_one import filled, one_for_one
from meshwright.cost.pipeline_ranks import RankSeconds, Shape, Turned
from meshwright.cost.pipeline_v import v_shaped
from meshwright.cost.table import SCHEDULES, BoolArray, IntArray
from meshwright.cost.work import FloatArray
from meshwright.schedule.build import SPLIT
from meshwright.spec.plan import ScheduleKind as Kind

__all__ = ["RankSeconds", "Shape", "held", "makespan"]

_WEIGHT_SHARE = 0.5  # of a backward: a linear layer's two gradients are products of the same size
_V = (Kind.ZERO_BUBBLE_V, Kind.DUAL_PIPE_V)


def makespan(
    shape: Shape,
    *,
    forward: RankSeconds,
    backward: RankSeconds,
    reach: FloatArray,
    weight: RankSeconds | None = None,
) -> FloatArray:
    """Seconds from the first forward to the last backward, shape (rows,).

    `reach` is the transfer seconds one way from rank 0 to each rank shown, shape (rows, ranks). `weight` is the part
    of `backward` that gives weights' gradients, half of it when None; schedules that do not split backwards do not
    ask. A slice takes its share of a microbatch.
    """
    seconds = np.zeros(len(shape.schedule))
    weight = backward.times(_WEIGHT_SHARE) if weight is None else weight
    for kinds, form in _FORMS:
        rows = np.flatnonzero(_among(shape.schedule, kinds))
        if not rows.size:
            continue
        split = SPLIT.issuperset(kinds)
        late = weight if split else weight.times(0.0)
        at = Turned.of(shape, rows, forward=forward, backward=backward, weight=late, reach=reach)
        seconds[rows] = form(at, shape.schedule[rows])
    return seconds


_FORMS: tuple[tuple[tuple[Kind, ...], Callable[[Turned, IntArray], FloatArray]], ...] = (
    ((Kind.GPIPE,), lambda at, _: filled(at)),
    ((Kind.ONE_F_ONE_B, Kind.SEQUENCE_1F1B), lambda at, _: one_for_one(at, depth=np.ones_like(at.units))),
    (
        (Kind.ZERO_BUBBLE_H1, Kind.ZERO_BUBBLE_H2),
        lambda at, kinds: one_for_one(at, depth=np.where(_among(kinds, (Kind.ZERO_BUBBLE_H2,)), 2.0, 1.0)),
    ),
    ((Kind.INTERLEAVED,), lambda at, _: interleaved(at)),
    ((Kind.BREADTH_FIRST,), lambda at, _: breadth_first(at)),
    (_V, lambda at, kinds: v_shaped(at, paired=_among(kinds, (Kind.DUAL_PIPE_V,)))),
)


def _among(schedules: IntArray, kinds: tuple[Kind, ...]) -> BoolArray:
    return np.isin(schedules, [SCHEDULES.index(kind) for kind in kinds])


def held(shape: Shape, *, first: FloatArray, last: FloatArray, total: FloatArray) -> FloatArray:
    """The most that a rank holds at once of what each microbatch leaves on its stages; all of shape (rows, ranks).

    gpipe and breadth-first hold every microbatch, 1f1b p - rank of them, seq1f1b of k slices (p - rank - 1 + k) / k,
    interleaved what Megatron's warm-up starts, H1 p and H2 2p - 1 of them as what weight gradients need waits for
    them, V shapes as many of the first stage as are on their way down and up, and of the last as are on their way up.
    """
    microbatches, pipeline = shape.microbatches[:, None], shape.pipeline[:, None]
    rank = shape.rank
    slices = np.ones_like(microbatches) if shape.slices is None else shape.slices[:, None]
    behind = pipeline - rank
    found = microbatches * total
    one = np.minimum((behind + slices - 1.0) / slices, microbatches) * total
    found = np.where(_mask(shape, (Kind.ONE_F_ONE_B, Kind.SEQUENCE_1F1B)), one, found)
    for kind, depth in ((Kind.ZERO_BUBBLE_H1, 1.0), (Kind.ZERO_BUBBLE_H2, 2.0)):
        deep = np.minimum(depth * (pipeline - 1.0) + 1.0, microbatches) * total
        found = np.where(_mask(shape, (kind,)), deep, found)
    extra = 2.0 * (behind - 1.0) + 1.0
    mixed = pipeline * (total - last) + np.minimum(extra, pipeline) * last + np.maximum(extra - pipeline, 0.0) * first
    found = np.where(_mask(shape, (Kind.INTERLEAVED,)), np.minimum(mixed, microbatches * total), found)
    down, up = pipeline + behind, rank + 1.0
    rising = np.minimum(down - 1.0, microbatches) * first + np.minimum(up, microbatches) * last
    going = np.minimum(down, microbatches) * first + np.minimum(up - 1.0, microbatches) * last
    found = np.where(_mask(shape, (Kind.ZERO_BUBBLE_V,)), np.maximum(rising, going), found)
    return np.where(_mask(shape, (Kind.DUAL_PIPE_V,)), down * first + up * last, found)


def _mask(shape: Shape, kinds: tuple[Kind, ...]) -> BoolArray:
    return _among(shape.schedule, kinds)[:, None]
