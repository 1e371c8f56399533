"""Seconds of a step at the least where few microbatches are under way at once and each goes to and fro over a slow
link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.pipeline_one import SLOW
from meshwright.cost.table import SCHEDULES
from meshwright.spec.plan import ScheduleKind

Floats = npt.NDArray[np.float64]
_PLAIN, _H1, _H2 = (
    SCHEDULES.index(kind)
    for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE_H1, ScheduleKind.ZERO_BUBBLE_H2)
)


def round_trips(
    table: PlanTable, *, arrays: LayoutArrays, forward: Floats, backward: Floats, reach: Sequence[Floats]
) -> Floats:
    """Seconds of every plan of `table` under 1f1b, zero bubble H1 or H2, shape (rows,); 0 of others.

    `arrays` show every rank. `forward` and `backward` are seconds of blocks at the least (rows, kinds), `reach` those
    of a microbatch from rank 0 to each rank on each kind of machines (rows, ranks). Two microbatches, or three under
    H2, are done on a rank while one goes to the next rank and comes back: of the slowest such cycle each takes its
    share, as `to_and_fro` of the closed forms has it, and one goes all the way while the pipeline fills and empties.
    """
    found = np.zeros(len(table))
    rows = np.flatnonzero(np.isin(table.schedule, (_PLAIN, _H1, _H2)) & (table.pipeline > 1))
    if not rows.size:
        return found
    some, layout, count = table.take(rows), table.layout[rows], table.microbatches[rows, None]
    plain, depth = (some.schedule == _PLAIN)[:, None], np.where(some.schedule == _H2, 2.0, 1.0)[:, None]
    # Weights' gradients that are put off come after a rank has answered: of the rest of a backward no least is known.
    answered = forward[rows] + np.where(plain, backward[rows], 0.0)
    own, upto = (
        _summed(counts[layout], each)
        for counts, each in ((arrays.total, forward[rows] + backward[rows]), (arrays.first_upto, answered))
    )
    valid = arrays.valid[layout]
    hops = np.where(valid[:, 1:], np.min([np.diff(way[rows], axis=1) for way in reach], axis=0), 0.0)
    cycles = (own[:, :-1] + np.diff(upto, axis=1) + 2.0 * hops) / (depth + 1.0)
    pace = np.where(valid[:, 1:], cycles, 0.0).max(axis=1, keepdims=True)
    there = np.cumsum(np.pad(hops, ((0, 0), (1, 0))), axis=1)
    ahead = depth * (some.pipeline[:, None] - 1 - arrays.rank[layout])
    once = upto.max(axis=1, keepdims=True) + 2.0 * there[:, -1:] - np.where(plain, 0.0, there)
    total = np.where(valid, np.maximum(count - 1.0 - ahead, 0.0) * pace + once, np.inf).min(axis=1)
    # A link counts only beside less work than this, and work takes as long as it does.
    found[rows] = np.minimum(total, hops.max(axis=1) / SLOW * count[:, 0])
    return found


def _summed(counts: Floats, each: Floats) -> Floats:
    """Sums over kinds of counts (rows, ranks, kinds + 1) times values (rows, kinds)."""
    return np.asarray(np.matmul(counts[..., :-1], each[..., None])[..., 0])
