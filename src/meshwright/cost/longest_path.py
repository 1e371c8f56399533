"""The longest path through the schedule of one plan: its event simulation, without transfers and with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.cost.simulate import StageSeconds, makespans
from meshwright.cost.work import FloatArray
from meshwright.schedule.build import program
from meshwright.schedule.graph import Graph, graph
from meshwright.spec.plan import ScheduleKind

ROUNDS = 6  # of one microbatch a rank; the path of ever more rounds is nearly a straight line after a few
MOST_ACTIONS = 500_000  # that are played one by one; a tenth of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Seconds from the first action to the last, without transfers and with them."""

    still: float
    moving: float
    exact: bool

    def instead(self, still: FloatArray, moving: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What to take for the closed form's two: where neither is exact, both are too short, and the longer counts."""
        if self.exact:
            return np.full_like(still, self.still), np.full_like(moving, self.moving)
        return np.maximum(still, self.still), np.maximum(moving, self.moving)


def longest_path(
    kind: ScheduleKind,
    *,
    stages: Sequence[StageSeconds],
    pipeline: int,
    chunks: int,
    microbatches: int,
    slices: int = 1,
) -> Path:
    """The path of the schedule of `stages`: exact up to half a million actions.

    For more the last of a few rounds of a microbatch a rank is added for those that are left out.
    """

    def played(count: int) -> tuple[float, float]:
        waves = _graph(kind, pipeline=pipeline, chunks=chunks, microbatches=count, slices=slices)
        return makespans(waves, stages=stages)

    if 3 * chunks * microbatches * pipeline * slices <= MOST_ACTIONS or microbatches <= ROUNDS * pipeline:
        still, moving = played(microbatches)
        return Path(still=still, moving=moving, exact=True)
    rest = microbatches % pipeline
    fewer, more = (played(count * pipeline + rest) for count in (ROUNDS - 1, ROUNDS))
    left = microbatches // pipeline - ROUNDS
    still, moving = (last + left * (last - first) for first, last in zip(fewer, more, strict=True))
    return Path(still=still, moving=moving, exact=False)


@lru_cache(maxsize=32)
def _graph(kind: ScheduleKind, *, pipeline: int, chunks: int, microbatches: int, slices: int) -> Graph:
    return graph(program(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices))
