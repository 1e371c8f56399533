"""The longest path through the schedule of plans: their event simulation, without transfers and with them.

In max-plus algebra a schedule of more and more microbatches grows by the mean of its slowest cycle once the first few
are done (Baccelli et al., Synchronization and Linearity, 1992, section 3.7). Cycles between neighbours close after two
or three microbatches, between slow links and all ranks after one for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np

from meshwright.cost.simulate import StageRows, makespans
from meshwright.cost.table import BoolArray, IntArray
from meshwright.cost.work import FloatArray
from meshwright.schedule import planned
from meshwright.schedule.graph import Graph, graph
from meshwright.spec.plan import Schedule

ROUNDS = 6  # of one microbatch a rank, after which the next ones are nearly alike
MOST_ACTIONS = 500_000  # that are played one by one; a tenth of a second
_CYCLE = 6  # microbatches in which cycles of two and of three close


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Seconds from the first action to the last without transfers and with them, shape (rows,); not a number where the
    path was not followed, and not `exact` where only its first part was.
    """

    still: FloatArray
    moving: FloatArray
    exact: BoolArray

    @classmethod
    def unknown(cls, rows: int) -> Path:
        """Of so many rows none of which was followed yet."""
        nothing = np.full((2, rows), np.nan)
        return cls(still=nothing[0], moving=nothing[1], exact=np.zeros(rows, dtype=np.bool_))

    def set(self, rows: IntArray, path: Path) -> None:
        """`rows` are those of `path`."""
        for mine, found in ((self.still, path.still), (self.moving, path.moving), (self.exact, path.exact)):
            mine[rows] = found

    def take(self, rows: slice) -> Path:
        """Those rows alone."""
        return Path(still=self.still[rows], moving=self.moving[rows], exact=self.exact[rows])

    def instead(self, still: FloatArray, moving: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What to take for the closed form's two: where neither is exact, both are too short, and the longer counts."""
        return (
            np.where(self.exact, self.still, np.fmax(still, self.still)),
            np.where(self.exact, self.moving, np.fmax(moving, self.moving)),
        )


def longest_path(
    entry: Schedule,
    *,
    stages: StageRows,
    pipeline: int,
) -> Path:
    """The path of the schedule of `stages`, row by row: exact up to half a million actions, and of a table.

    For more the growth over some whole cycles, which end a multiple of them before the last microbatch, is added for
    the cycles that are left out.
    """
    rows = stages.rows
    both = stages.still().beside(stages)

    def played(count: int) -> FloatArray:
        return makespans(_graph(planned.of_first(entry, count), pipeline=pipeline), stages=both)

    fewer, more = played_microbatches(entry, pipeline=pipeline)
    seconds = played(more)
    if fewer < more:
        seconds = seconds + (entry.microbatches - more) / (more - fewer) * (seconds - played(fewer))
    exact = np.full(rows, fewer == more)
    return Path(still=seconds[:rows], moving=seconds[rows:], exact=exact)


def played_microbatches(entry: Schedule, *, pipeline: int) -> tuple[int, int]:
    """How many microbatches of a schedule are played, fewer and more: all of them twice where they are few enough, and
    of a table, which need not grow by any cycle.
    """
    each, microbatches = 3 * entry.chunks * pipeline * entry.slices, entry.microbatches
    cycle = lcm(pipeline, _CYCLE)
    first = ROUNDS * pipeline
    fewer = first + (microbatches - first) % cycle
    if entry.table or each * microbatches <= MOST_ACTIONS or microbatches <= fewer + cycle:
        return microbatches, microbatches
    return fewer, fewer + cycle


@lru_cache(maxsize=32)
def _graph(entry: Schedule, *, pipeline: int) -> Graph:
    return graph(planned.program(entry, pipeline=pipeline))
