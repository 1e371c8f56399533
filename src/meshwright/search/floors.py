"""What a score is at the least: bounds of seconds and bytes in the terms of the job's objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.fitting import most_likely
from meshwright.cost.uncertainty import least_upper
from meshwright.search.bound import Bounds
from meshwright.search.candidate import LEAST_LIKELY
from meshwright.search.meetings import EVERY_STEP
from meshwright.search.prices import may_fit
from meshwright.search.rooms import device_rooms, largest_room
from meshwright.search.schedules import ONE_F_ONE_B
from meshwright.search.space import Space
from meshwright.search.states_held import least_states
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SLICE = 16_384  # plans whose figures a processor's cache holds
FEW = 4  # pipeline ranks
FRAMES = 2_000  # whose lightest plans are weighed at a time


class Floors:
    """Scores at the least of the plans of a table, each of the frame given, where they surely fit; shape (rows,).

    `shared` is of all plans with that microbatch, `scheduled` of those with that schedule too, `own` of the plan
    itself. Scores are what the objective minimises: seconds or device-seconds at the upper end of their interval, or
    bytes, which `of_bytes` tells; infinite where that end is beyond `within` seconds.
    """

    def __init__(
        self, space: Space, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, within: float = np.inf
    ) -> None:
        self._space, self._model, self._cluster, self._job = space, model, cluster, job
        self._bounds = Bounds(space, model=model, cluster=cluster, job=job)
        self._ways = space.values("sync")
        self._rooms = device_rooms(cluster)
        self._room = max(self._rooms)
        self.of_bytes = job.objective is Objective.MEMORY
        self.within = within

    def frames(self, among: Mask) -> Floats:
        """Of every frame of `among`, shape (frames,); infinite of others."""
        if not self.of_bytes or self.within < np.inf:
            found = np.where(among, self._seconds_of_frames(), np.inf)
        else:
            found = np.where(among, 0.0, np.inf)
        if self.of_bytes:
            left = np.flatnonzero(found < np.inf)
            found[left] = self.lightest(left)
        return found

    def lightest(self, frames: Ids) -> Floats:
        """What the plans that hold least hold in each of `frames`: the smallest microbatch, all that can be sharded
        sharded widest, one stage a rank, whatever is recomputed and offloaded."""
        light, found = self._space.lightest, np.full(len(frames), np.inf)
        for start in range(0, len(frames), FRAMES):
            some = frames[start : start + FRAMES]
            counts = light.sizes[some]
            held = self.bytes(light.rows_of(some), light.frame_of(some), ranks=1)
            least = np.minimum.reduceat(held, (np.cumsum(counts) - counts)[counts > 0]) if len(held) else held
            found[start : start + FRAMES][counts > 0] = least
        return found

    def _seconds_of_frames(self) -> Floats:
        frames = self._space.frames
        columns: dict[str, npt.ArrayLike] = {
            name: frames[name] for name in ("tensor", "context", "pipeline", "precision")
        }
        columns["replicate"] = frames["data"]
        return self._score(PlanTable.build(columns, layouts=()), self._bounds.frames())

    def shared(self, table: PlanTable, frames: Ids) -> Floats:
        # Of schedules that are known best: others are less sure, and their plans' scores higher.
        known = replace(table, schedule=np.full_like(table.schedule, ONE_F_ONE_B))
        return self._of(known, frames, self._bounds.shared)

    def scheduled(self, table: PlanTable, frames: Ids) -> Floats:
        return self._of(table, frames, self._bounds.scheduled)

    def own(self, table: PlanTable, frames: Ids) -> Floats:
        return self.bytes(table, frames) if self.of_bytes else self._of(table, frames, self._bounds.seconds)

    def slow(self, table: PlanTable, frames: Ids) -> Mask:
        """Which plans of `table` are beyond `within`, whatever more they compute again or carry."""
        if self.within == np.inf:
            return np.zeros(len(table), dtype=np.bool_)
        return np.isinf(self._of(table, frames, self._bounds.seconds))

    def bytes(self, table: PlanTable, frames: Ids, *, ranks: int = 3) -> Floats:
        """Bytes that so many ranks of every plan hold at the least; where bytes are not what is minimised those of
        ranks with less room than the largest device count for as many times as much."""
        return _sliced(table, frames, partial(self._bounds.bytes, ranks=ranks, scarce=not self.of_bytes))

    def states(self, table: PlanTable) -> Floats:
        """Bytes of the parameters and the optimizer state alone that the fullest rank of every plan holds at the
        least."""
        return least_states(table, model=self._model, job=self._job)

    def roughly(self, table: PlanTable, frames: Ids) -> Floats:
        """As `bytes`, of one rank, however replicas meet; infinite where its parameters and optimizer state alone do
        not fit."""
        rows = np.flatnonzero(may_fit(table, model=self._model, cluster=self._cluster, job=self._job))
        found = np.full(len(table), np.inf)
        if len(rows):
            some = table.take(rows)
            others = [replace(some, sync=np.full(len(some), way)) for way in self._ways if way != EVERY_STEP]
            each = [self.bytes(one, frames[rows], ranks=1) for one in (some, *others)]
            found[rows] = np.min(each, axis=0)
        return found

    def held(self, total: Floats) -> Floats:
        """The score of plans that hold `total` bytes or more."""
        return total if self.of_bytes else np.zeros_like(total)

    def likely(self, total: Floats, table: PlanTable) -> Floats:
        """By how much the score of plans of `table` that hold `total` bytes or more is divided at the most; 0 where
        that is more than the largest device has."""
        room = largest_room(table, cluster=self._cluster)
        odds = np.ones_like(total) if self.of_bytes else most_likely(np.minimum(total, self._room), capacity=room)
        return np.where(total <= self._room, np.maximum(odds, LEAST_LIKELY), 0.0)

    def _of(self, table: PlanTable, frames: Ids, seconds: Callable[..., Floats]) -> Floats:
        if self.of_bytes and self.within == np.inf:
            return np.zeros(len(table))
        return self._score(table, _sliced(table, frames, seconds))

    def _score(self, table: PlanTable, seconds: Floats) -> Floats:
        """What the score of every plan of `table` is at the least where it takes `seconds` or more."""
        upper = least_upper(seconds, table, model=self._model, cluster=self._cluster, job=self._job)
        each = table.world if self._job.objective is Objective.COST else 1.0
        return np.where(upper > self.within, np.inf, np.zeros_like(upper) if self.of_bytes else upper * each)


def _sliced(table: PlanTable, frames: Ids, of: Callable[..., Floats]) -> Floats:
    """What `of` says of every row, asked of as many at a time as a processor's cache holds, those of few pipeline ranks
    apart: they are not to take as long as those of many."""
    few, found = table.pipeline <= FEW, np.zeros(len(table))
    for rows in (np.flatnonzero(few), np.flatnonzero(~few)):
        for start in range(0, len(rows), SLICE):
            some = rows[start : start + SLICE]
            found[some] = of(table.take(some), frames=frames[some])
    return found
