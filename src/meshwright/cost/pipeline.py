"""Closed forms of a pipeline's makespan, with stages as uneven as they are.

The makespan is the longest path through the schedule; each form takes the longest of a few kinds of path, so that it
falls short of the event simulation rather than exceeds it. gpipe is exact, and breadth-first where stages of a rank
between its first and last are alike. Of equal layers with an embedding and a head and two microbatches a rank or more
all are told within 1 %. Of stages up to 30 % apart 1f1b, seq1f1b, H1 and H2 are told within 1 %; single cases of zero
bubble V fall short by 2 %, of DualPipeV by 4 %, of interleaved by 6 %, and by 14 % where a few stages have twice the
layers. Over a link ten times as slow as a stage the mean miss is 0.2 % (1f1b), 2 to 3 % (H2, interleaved) and 10 to
13 % (V shapes, a quarter at the worst). `longest_path` mends all of these for plans that are shown;
`benchmarks/schedules` and tests/cost/test_pipeline.py measure them. Zero bubble V of fewer than 2p - 1 microbatches is
told up to a quarter too short, half over slow links, and the search leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.cost.pipeline_held import held
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
_NARROW = 12  # ranks shown; so few are priced at once, whatever each row has
_V = (Kind.ZERO_BUBBLE_V, Kind.DUAL_PIPE_V)


def makespan(
    shape: Shape,
    *,
    forward: RankSeconds,
    backward: RankSeconds,
    reach: FloatArray,
    weight: RankSeconds | None = None,
) -> FloatArray:
    """Seconds from the first forward to the last backward, shape (rows,); 0 of tables, whose path is followed.

    `reach` is the transfer seconds one way from rank 0 to each rank shown, shape (rows, ranks). `weight` is the part
    of `backward` that gives weights' gradients, half of it when None; schedules that do not split backwards do not
    ask. A slice takes its share of a microbatch.
    """
    weight = backward.times(_WEIGHT_SHARE) if weight is None else weight
    seconds = np.zeros(len(shape.schedule))
    none, widths = weight.times(0.0), _widths(shape)
    for kinds, form in _FORMS:
        late = weight if SPLIT.issuperset(kinds) else none
        chosen = _among(shape.schedule, kinds)
        for width in np.unique(widths[chosen]):
            rows = np.flatnonzero(chosen & (widths == width))
            at = Turned.of(shape, rows, forward=forward, backward=backward, weight=late, reach=reach)
            seconds[rows] = form(at, shape.schedule[rows])
    return seconds


def _widths(shape: Shape) -> IntArray:
    """A number for rows of about as many ranks, shape (rows,): few ranks are not to be priced as if they were many."""
    if shape.valid.shape[1] <= _NARROW:
        return np.zeros(len(shape.schedule), dtype=np.int64)
    return np.asarray(np.searchsorted([4, 16, 64], shape.valid.sum(axis=1)), dtype=np.int64)


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
    return np.array([kind in kinds for kind in SCHEDULES])[schedules]
