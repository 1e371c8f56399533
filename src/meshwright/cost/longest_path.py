"""The longest path through the schedule of one plan: what the event simulation finds, many actions at a time.

Actions at the same depth of the schedule's graph wait for no other of them and are timed together. Schedules of many
rounds repeat themselves: the last of a few rounds is added for those that are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from meshwright.cost.simulate import StageSeconds
from meshwright.cost.work import FloatArray
from meshwright.schedule.build import build
from meshwright.schedule.table import Table, Work
from meshwright.spec.plan import ScheduleKind

ROUNDS = 6  # of one microbatch a rank; the path of ever more rounds is nearly a straight line after a few

Ids = npt.NDArray[np.intp]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """Actions sorted by depth, which `waves` cuts into slices; arrays of shape (actions,).

    `before` is the action before on the rank and `needed` the one whose output arrives, len(actions) where there is
    none; `link` is the stage that the output leaves forward or reaches backward, -1 where none is needed.
    """

    waves: tuple[slice, ...]
    before: Ids
    needed: Ids
    stage: Ids
    work: Ids
    link: Ids


def longest_path(
    kind: ScheduleKind, *, stages: Sequence[StageSeconds], pipeline: int, chunks: int, microbatches: int
) -> Path:
    """The path of the schedule of `stages`: exact up to 6 microbatches a rank, a lower bound for more."""
    if microbatches <= ROUNDS * pipeline:
        still, moving = _played(kind, stages=stages, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
        return Path(still=still, moving=moving, exact=True)
    fewer, more = (
        _played(kind, stages=stages, pipeline=pipeline, chunks=chunks, microbatches=count * pipeline)
        for count in (ROUNDS - 1, ROUNDS)
    )
    left = microbatches / pipeline - ROUNDS
    still, moving = (last + left * (last - first) for first, last in zip(fewer, more, strict=True))
    return Path(still=still, moving=moving, exact=False)


def _played(
    kind: ScheduleKind, *, stages: Sequence[StageSeconds], pipeline: int, chunks: int, microbatches: int
) -> tuple[float, float]:
    graph = _graph(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    each = np.array([[stage.of(work) for work in Work] for stage in stages])
    seconds = each[graph.stage, graph.work][:, None]
    ways = np.array([*(stage.transfer for stage in stages), 0.0])[graph.link]
    delay = np.stack([np.zeros_like(ways), ways], axis=1)
    ends: FloatArray = np.zeros((len(ways) + 1, 2))
    for wave in graph.waves:
        arrived = ends[graph.needed[wave]] + delay[wave]
        ends[wave] = np.maximum(ends[graph.before[wave]], arrived) + seconds[wave]
    still, moving = ends.max(axis=0)
    return float(still), float(moving)


@lru_cache(maxsize=64)
def _graph(kind: ScheduleKind, *, pipeline: int, chunks: int, microbatches: int) -> _Graph:
    table = build(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    stages, count = pipeline * chunks, sum(len(row) for row in table)
    rank, work, stage, microbatch = _columns(table)
    back = np.isin(work, [_WORKS[Work.BACKWARD], _WORKS[Work.INPUT]])
    forward = work == _WORKS[Work.FORWARD]
    ids = np.arange(count)
    made = np.full((2, stages + 2, microbatches), count)
    made[0, stage[forward] + 1, microbatch[forward]] = ids[forward]
    made[1, stage[back] + 1, microbatch[back]] = ids[back]
    needed = np.full(count, count)
    needed[forward] = made[0, stage[forward], microbatch[forward]]
    needed[back] = made[1, stage[back] + 2, microbatch[back]]
    first = np.r_[True, rank[1:] != rank[:-1]]
    before = np.where(first, count, ids - 1)
    link = np.where(needed < count, np.where(forward, stage - 1, stage), -1)
    order, waves = _waves(needed, first)
    turned = np.r_[np.argsort(order), count]
    return _Graph(
        waves=waves,
        before=turned[before[order]],
        needed=turned[needed[order]],
        stage=stage[order],
        work=work[order],
        link=link[order],
    )


def _columns(table: Table) -> tuple[Ids, Ids, Ids, Ids]:
    """Rank, work, stage and microbatch of every action, row by row."""
    actions = [(rank, _WORKS[a.work], a.stage, a.microbatch) for rank, row in enumerate(table) for a in row]
    rank, work, stage, microbatch = np.array(actions, dtype=np.intp).T
    return rank, work, stage, microbatch


def _waves(needed: Ids, first: npt.NDArray[np.bool_]) -> tuple[Ids, tuple[slice, ...]]:
    """The ids sorted by depth, and where each depth begins and ends."""
    count = len(needed)
    position = np.flatnonzero(first)
    end = np.r_[position[1:], count]
    done = np.zeros(count + 1, dtype=np.bool_)
    done[count] = True
    found = []
    while position.size:
        ready = done[needed[position]]
        ids = position[ready]
        assert ids.size, "the table deadlocks"
        done[ids] = True
        found.append(ids)
        position = position + ready
        going = position < end
        if not going.all():
            position, end = position[going], end[going]
    edges = np.cumsum([0, *(len(ids) for ids in found)])
    return np.concatenate(found), tuple(slice(a, b) for a, b in pairwise(edges))


_WORKS = {work: index for index, work in enumerate(Work)}
