"""Plans of some frames priced in the order of what they promise, lighter ones only where those before do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.choices import Choices, Picked

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Rung = tuple[int, int]
FIRST = 1_000  # plans priced at a time at first, and then twice as many each time: the best come early
MOST = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """What bounds say of the plans of a table, each of the frame given: scores and bytes at the least.

    `shared` of all plans with that microbatch, `widest` of those like it whose state is sharded over fewer ranks,
    `own` of the plan itself.
    """

    shared: Callable[[PlanTable, Ids], Floats]
    widest: Callable[[PlanTable, Ids], Floats]
    own: Callable[[PlanTable, Ids], Floats]
    bytes: Callable[[PlanTable, Ids], Floats]


class Ladder:
    """What recompute and offload each plan may choose: the rungs, the first of them with the least of both.

    Neither makes the same plan faster. So a plan that fits is not priced with more of either, but where `every` rung
    is asked for. `hopeless` counts plans that cannot fit.
    """

    def __init__(self, choices: Choices, rungs: tuple[list[int], list[int]], *, floors: Floors, room: float) -> None:
        again, away = rungs
        self._choices, self._floors, self._room = choices, floors, room
        self._least: Rung = (again[0], away[0])
        self._rungs = sorted(product(again, away), key=self._added)
        self.hopeless = 0

    def climb(
        self, frames: Ids, keep: Callable[[PlanTable], Mask], limit: Callable[[], float], *, every: bool = False
    ) -> None:
        """Hands `keep` the plans of `frames` that may fit and score below `limit`, and is told which of them fit."""
        fitting: dict[Rung, Ids] = {}
        cores = self._cores(frames, limit())
        for rung in self._rungs:
            rows = self._rows(cores, rung, limit())
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

    def _cores(self, frames: Ids, limit: float) -> Picked:
        """Choices of all but the ranks that state is sharded over, of which a plan may be below `limit`."""
        picked = self._choices.of(frames)
        if np.isfinite(limit):
            picked = picked.take(self._floors.shared(self._on(picked, 0, self._least), picked.frames) < limit)
        picked, _ = self._choices.after(picked, 1)
        if np.isfinite(limit):
            picked = picked.take(self._floors.widest(self._on(picked, 1, self._least), picked.frames) < limit)
        return picked

    def _rows(self, cores: Picked, rung: Rung, limit: float) -> Picked:
        """Plans of `cores` on `rung` that may fit where all state is sharded, and be below `limit`."""
        if not len(cores):
            return cores
        table = self._on(cores, 1, rung)
        if np.isfinite(limit) and rung != self._least:
            below = self._floors.widest(table, cores.frames) < limit
            cores, table = cores.take(below), table.take(below)
        fits = self._floors.bytes(table, cores.frames) <= self._room
        self.hopeless += int(self._choices.plans(cores.take(~fits), 1).sum())
        return self._choices.after(cores.take(fits), 2)[0]

    def _priced(
        self, rows: Picked, rung: Rung, keep: Callable[[PlanTable], Mask], limit: Callable[[], float]
    ) -> Mask:
        """Prices those of `rows` that may be below the limit, the most promising first; which of all rows fit."""
        fits = np.zeros(len(rows), dtype=np.bool_)
        if not len(rows):
            return fits
        table = self._on(rows, 2, rung)
        light = self._floors.bytes(table, rows.frames) <= self._room
        self.hopeless += int(np.count_nonzero(~light))
        left = np.flatnonzero(light)
        floor = self._floors.own(table.take(left), rows.frames[left])
        order = np.argsort(floor, kind="stable")
        left, floor = left[order], floor[order]
        start, size = 0, FIRST
        while start < len(left) and floor[start] < limit():
            stop = min(start + size, int(np.searchsorted(floor, limit())))
            fits[left[start:stop]] = keep(table.take(left[start:stop]))
            start, size = stop, min(2 * size, MOST)
        return fits
