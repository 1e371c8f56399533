"""In which order the stages of a rank go back: one after another, down and up a V, in pairs or in halves."""

from __future__ import annotations

import numpy as np

from meshwright.cost.pipeline import Shape, held
from meshwright.cost.table import SCHEDULES, BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.schedule import written
from meshwright.schedule.build import V_SHAPES
from meshwright.spec.plan import ScheduleKind

_SPLIT = [SCHEDULES.index(kind) for kind in (ScheduleKind.ZERO_BUBBLE_H1, ScheduleKind.ZERO_BUBBLE_H2)]
_TURNS = [SCHEDULES.index(kind) for kind in (ScheduleKind.INTERLEAVED, ScheduleKind.BREADTH_FIRST)]
_V_SHAPES = [SCHEDULES.index(kind) for kind in V_SHAPES]
_DUAL_PIPE = SCHEDULES.index(ScheduleKind.DUAL_PIPE_V)


def in_pairs(table: PlanTable, shape: Shape) -> BoolArray:
    """Rows that go down a V as others come up, so that the first rank has some of these when as many as ever are on
    their way down, shape (rows,): DualPipeV, and tables of which that is counted."""
    found = table.schedule == _DUAL_PIPE
    if not shape.tables:
        return np.asarray(found)
    ones = np.ones(shape.rank.shape)
    both = held(shape, first=ones, last=ones, total=2.0 * ones) > held_down(shape)
    return np.asarray(found | (_told_as_v(table) & (both & (shape.rank == 0.0)).any(axis=1)))


def held_down(shape: Shape) -> FloatArray:
    """The most microbatches that a rank's first stage holds, shape (rows, ranks)."""
    ones = np.ones(shape.rank.shape)
    return held(shape, first=ones, last=0.0 * ones, total=ones)


def _told_as_v(table: PlanTable) -> BoolArray:
    """Rows of tables whose stages do not go on from the last rank to the first, shape (rows,)."""
    told = np.array([bool(layout.table) and not layout.loops for layout in table.layouts])[table.layout]
    return np.asarray((table.chunks > 1) & told)


def in_turns(table: PlanTable) -> BoolArray:
    """Rows whose ranks have several stages that end one after another, the last one first, shape (rows,)."""
    told = np.array([bool(layout.table) and layout.loops for layout in table.layouts])[table.layout]
    return np.asarray((table.chunks > 1) & (np.isin(table.schedule, _TURNS) | told))


def turns(table: PlanTable, shape: Shape) -> BoolArray:
    """Ranks at the bottom of a V, shape (rows, ranks)."""
    shaped = ((table.chunks > 1) & np.isin(table.schedule, _V_SHAPES)) | _told_as_v(table)
    return np.asarray(shaped[:, None] & (shape.rank == shape.pipeline[:, None] - 1.0))


def splits(table: PlanTable) -> BoolArray:
    """Rows whose only stage on a rank gives the gradients of inputs first, shape (rows,)."""
    told = np.array([written.splits(layout.table) for layout in table.layouts])[table.layout]
    return np.asarray(np.isin(table.schedule, _SPLIT) | (told & (table.chunks == 1)))
