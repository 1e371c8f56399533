"""Plans of some frames priced in the order of what they promise, lighter ones only where those before do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.choices import MICROBATCH, PLAN, SCHEDULE, SHARDING, Choices, Picked

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Rung = tuple[int, int]
FIRST = 1_000  # plans priced at a time at first, and then twice as many each time: the best come early
MOST = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """What bounds say of the plans of a table, each of the frame given: scores at the least, and whether it may fit.

    `shared` of all plans with that microbatch, `scheduled` of those with that schedule too, `own` of the plan itself;
    `may_fit` looks at more ranks than `roughly_fits`.
    """

    shared: Callable[[PlanTable, Ids], Floats]
    scheduled: Callable[[PlanTable, Ids], Floats]
    own: Callable[[PlanTable, Ids], Floats]
    roughly_fits: Callable[[PlanTable, Ids], Mask]
    may_fit: Callable[[PlanTable, Ids], Mask]


class Ladder:
    """What recompute and offload each plan may choose: the rungs, the first of them with the least of both.

    Neither makes the same plan faster. So a plan that fits is not priced with more of either, but where `every` rung
    is asked for. `hopeless` counts plans that cannot fit.
    """

    def __init__(self, choices: Choices, rungs: tuple[list[int], list[int]], *, floors: Floors) -> None:
        again, away = rungs
        self._choices, self._floors = choices, floors
        self._least: Rung = (again[0], away[0])
        self._rungs = sorted(product(again, away), key=self._added)
        self.hopeless = 0

    def climb(
        self, frames: Ids, keep: Callable[[PlanTable], Mask], limit: Callable[[], float], *, every: bool = False
    ) -> None:
        """Hands `keep` the plans of `frames` that may fit and score below `limit`, and is told which of them fit."""
        fitting: dict[Rung, Ids] = {}
        picked = self._choices.of(frames)
        if np.isfinite(limit()):
            picked = picked.take(self._floors.shared(self._on(picked, MICROBATCH, self._least), picked.frames) < limit())
        picked = self._choices.after(picked, SCHEDULE)
        for rung in self._rungs:
            picked, some = self._scheduled(picked, rung, limit())
            rows = self._rows(some, rung)
            codes = rows.at * len(self._choices.frames) + rows.frames
            lighter = [fitting[key] for key in self._lighter(rung) if key in fitting and not every]
            if lighter:
                left = ~np.isin(codes, np.concatenate(lighter))
                rows, codes = rows.take(left), codes[left]
            fits = self._priced(rows, rung, keep, limit)
            fitting[rung] = codes[fits]

    def _added(self, rung: Rung) -> int:
        return int(rung[0] > self._least[0]) + int(rung[1] > self._least[1])

    def _lighter(self, rung: Rung) -> list[Rung]:
        """Rungs whose plans are never slower than those of `rung`."""
        return [other for other in (self._least, (rung[0], self._least[1]), (self._least[0], rung[1])) if other != rung]

    def _on(self, picked: Picked, step: int, rung: Rung) -> PlanTable:
        table = self._choices.table(picked, step)
        rows = np.ones(len(table), dtype=np.int64)
        return replace(table, recompute=rung[0] * rows, offload=rung[1] * rows)

    def _scheduled(self, picked: Picked, rung: Rung, limit: float) -> tuple[Picked, Picked]:
        """Of the schedules `picked` those that may be below `limit` on any rung, and on this one."""
        if not np.isfinite(limit) or not len(picked):
            return picked, picked
        below = self._floors.scheduled(self._on(picked, SCHEDULE, rung), picked.frames) < limit
        return (picked.take(below) if rung == self._least else picked), picked.take(below)

    def _rows(self, picked: Picked, rung: Rung) -> Picked:
        """Plans with the schedules `picked` that may fit where state is sharded over all ranks that it may be."""
        picked = self._choices.after(picked, SHARDING)
        if not len(picked):
            return picked
        fits = self._floors.roughly_fits(self._on(picked, SHARDING, rung), picked.frames)
        self.hopeless += int(self._choices.plans(picked.take(~fits), SHARDING).sum())
        return self._choices.after(picked.take(fits), PLAN)

    def _priced(
        self, rows: Picked, rung: Rung, keep: Callable[[PlanTable], Mask], limit: Callable[[], float]
    ) -> Mask:
        """Prices those of `rows` that may be below the limit, the most promising first; which of all rows fit."""
        fits = np.zeros(len(rows), dtype=np.bool_)
        if not len(rows):
            return fits
        table = self._on(rows, PLAN, rung)
        floor = self._floors.own(table, rows.frames)
        left = np.flatnonzero(floor < limit())
        light = self._floors.may_fit(table.take(left), rows.frames[left])
        self.hopeless += int(np.count_nonzero(~light))
        left = left[light]
        left = left[np.argsort(floor[left], kind="stable")]
        floor = floor[left]
        start, size = 0, FIRST
        while start < len(left) and floor[start] < limit():
            stop = min(start + size, int(np.searchsorted(floor, limit())))
            fits[left[start:stop]] = keep(table.take(left[start:stop]))
            start, size = stop, min(2 * size, MOST)
        return fits
