"""Plans of some frames priced in the order of what they promise, lighter ones only where those before do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.choices import MICROBATCH, PLAN, SCHEDULE, SHARDING, Choices, Picked
from meshwright.search.floors import Floors

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
FIRST = 1_000  # plans priced at a time at first, and then twice as many each time: the best come early
MOST = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Only plans whose `column` is another than `value` are asked for."""

    column: str
    value: int


class Ladder:
    """What recompute and offload each plan may choose: the rungs, the first of them with the least of both.

    Neither makes the same plan faster. So a plan whose seconds are above the limit is left out with more of either, and
    one that surely fits too, but where `every` rung is asked for. `hopeless` counts plans that cannot fit. No plan is
    priced twice.
    """

    def __init__(
        self,
        choices: Choices,
        rungs: tuple[list[int], list[int]],
        *,
        floors: Floors,
        allows: Callable[[PlanTable], Mask],
    ) -> None:
        """Plans that `allows` leaves out of a table are not priced."""
        again, away = (np.array(values) for values in rungs)
        self._choices, self._floors, self._allows = choices, floors, allows
        self._again, self._away = np.repeat(again, len(away)), np.tile(away, len(again))
        self._added = (self._again > again[0]).astype(np.int64) + (self._away > away[0])
        # Rungs whose plans are never slower: the least, those with as much recompute, and those with as much offload.
        rung = np.arange(len(self._again))
        self._lighter = (0 * rung, rung - rung % len(away), rung % len(away))
        self._priced: Ids = np.zeros(0, dtype=np.int64)
        self._fitting: Ids = self._priced
        self.hopeless = 0

    def climb(
        self,
        frames: Ids,
        keep: Callable[[PlanTable], Mask],
        limit: Callable[[], float],
        *,
        every: bool = False,
        other: Other | None = None,
    ) -> None:
        """Hands `keep` the plans of `frames` that may fit and score below `limit`, and is told which surely fit."""
        picked = self._choices.of(frames)
        if np.isfinite(limit()):
            picked = picked.take(self._floors.shared(self._on(picked, MICROBATCH), picked.frames) < limit())
        picked = self._after(picked, SCHEDULE, other)
        picked = self._scheduled(picked, limit())
        beaten: Ids = np.zeros(0, dtype=np.int64)
        for added in range(int(self._added.max()) + 1):
            level = [rung for rung in np.flatnonzero(self._added == added).tolist() if self._asked(rung, other)]
            if not level:
                continue
            some = self._scheduled(picked.times(level), limit()) if added else picked
            rows = self._rows(some, other, limit())
            rows = rows.take(~_among(self._code(rows, rows.rung), np.sort(self._priced)))
            done = np.sort(beaten if every else np.concatenate([beaten, self._fitting]))
            for lighter in self._lighter:
                rows = rows.take(~_among(self._code(rows, lighter[rows.rung]), done))
            priced, fits, slower = self._best_first(rows, keep, limit)
            if not self._floors.of_bytes:
                beaten = np.concatenate([beaten, self._code(slower, slower.rung)])
            self._priced = np.concatenate([self._priced, self._code(priced, priced.rung)])
            self._fitting = np.concatenate([self._fitting, self._code(fits, fits.rung)])

    def _code(self, rows: Picked, rung: Ids) -> Ids:
        """A number for every plan; those of a frame are neighbours."""
        return (rows.frames * self._choices.count + rows.at) * len(self._again) + rung

    def _asked(self, rung: int, other: Other | None) -> bool:
        if other is None or other.column not in ("recompute", "offload"):
            return True
        return bool((self._again if other.column == "recompute" else self._away)[rung] != other.value)

    def _after(self, picked: Picked, step: int, other: Other | None) -> Picked:
        picked = self._choices.after(picked, step)
        return (
            picked if other is None else picked.take(self._choices.differ(other.column, other.value, step)[picked.at])
        )

    def _on(self, picked: Picked, step: int) -> PlanTable:
        table = self._choices.table(picked, step)
        return replace(table, recompute=self._again[picked.rung], offload=self._away[picked.rung])

    def _scheduled(self, picked: Picked, limit: float) -> Picked:
        """Of the schedules `picked` those of which a plan may be below `limit`."""
        if not np.isfinite(limit) or not len(picked):
            return picked
        return picked.take(self._floors.scheduled(self._on(picked, SCHEDULE), picked.frames) < limit)

    def _rows(self, picked: Picked, other: Other | None, limit: float) -> Picked:
        """Plans with the schedules `picked` that may fit where state is sharded over all ranks that it may be, and may
        be below `limit` for what they hold."""
        picked = self._after(picked, SHARDING, other)
        if not len(picked):
            return picked
        total = self._floors.roughly(self._on(picked, SHARDING), picked.frames)
        fits = self._floors.likely(total) > 0.0
        self.hopeless += int(self._choices.plans(picked.take(~fits), SHARDING).sum())
        return self._after(picked.take(fits & (self._floors.held(total) < limit)), PLAN, other)

    def _best_first(
        self, rows: Picked, keep: Callable[[PlanTable], Mask], limit: Callable[[], float]
    ) -> tuple[Picked, Picked, Picked]:
        """Prices those of `rows` that may be below the limit, the most promising first: they, those that fit, and those
        that are above it wherever they fit."""
        if not len(rows):
            return rows, rows, rows
        table = self._on(rows, PLAN)
        floor = self._floors.own(table, rows.frames)
        below = floor < limit()
        left, slower = np.flatnonzero(below), rows.take(~below)
        left = left[self._allows(table.take(left))]
        likely = self._floors.likely(self._floors.bytes(table.take(left), rows.frames[left]))
        self.hopeless += int(np.count_nonzero(likely == 0.0))
        left, likely = left[likely > 0.0], likely[likely > 0.0]
        floor[left] /= likely
        left = left[np.argsort(floor[left], kind="stable")]
        floor, fits = floor[left], np.zeros(len(left), dtype=np.bool_)
        start, size = 0, FIRST
        while start < len(left) and floor[start] < limit():
            stop = min(start + size, int(np.searchsorted(floor, limit())))
            fits[start:stop] = keep(table.take(left[start:stop]))
            start, size = stop, min(2 * size, MOST)
        return rows.take(left[:start]), rows.take(left[fits]), slower


def _among(values: Ids, known: Ids) -> Mask:
    """Which of `values` are in `known`, which is sorted: faster than np.isin where neighbours lie beside each other."""
    at = np.searchsorted(known, values)
    return np.asarray(np.append(known, -1)[at] == values)
