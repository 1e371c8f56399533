"""Plans of some frames priced in the order of what they promise, lighter ones only where those before do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.choices import MICROBATCH, PLAN, SCHEDULE, SHARDING, Choices, Picked
from meshwright.search.floors import Floors
from meshwright.search.wanted import Wanted

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
FIRST = 1_000  # plans priced at a time at first, and then twice as many each time: the best come early
MOST = 4_000


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
        wanted: Sequence[Wanted],
        *,
        every: bool = False,
    ) -> None:
        """Hands `keep` the plans of `frames` that are `wanted` and may fit, and is told which surely fit."""
        picked = self._below(self._choices.of(frames), MICROBATCH, wanted, self._floors.shared)
        picked = self._below(self._choices.after(picked, SCHEDULE), SCHEDULE, wanted, self._floors.scheduled)
        beaten: Ids = np.zeros(0, dtype=np.int64)
        levels = range(int(self._added.max()) + 1)
        for added in reversed(levels) if self._floors.of_bytes else levels:  # those that hold least, or take least
            level = picked.times(np.flatnonzero(self._added == added).tolist())
            level = level.take(self._limits(level, SCHEDULE, wanted) > -np.inf)
            some = self._below(level, SCHEDULE, wanted, self._floors.scheduled) if added else level
            rows = self._rows(some, wanted)
            rows = rows.take(~_among(self._code(rows, rows.rung), np.sort(self._priced)))
            done = np.sort(beaten if every else np.concatenate([beaten, self._fitting]))
            for lighter in self._lighter:
                rows = rows.take(~_among(self._code(rows, lighter[rows.rung]), done))
            priced, fits, slower = self._best_first(rows, keep, wanted)
            beaten = np.concatenate([beaten, self._code(slower, slower.rung)])
            self._priced = np.concatenate([self._priced, self._code(priced, priced.rung)])
            self._fitting = np.concatenate([self._fitting, self._code(fits, fits.rung)])

    def _limits(self, picked: Picked, step: int, wanted: Sequence[Wanted], *, heavier: bool = False) -> Floats:
        """The score below which any plan after each of `picked` is wanted, with its recompute and offload or, where
        `heavier` ones are to follow, with any; minus infinity where none is; shape (picked,)."""
        found = np.full(len(picked), -np.inf)
        for one in wanted:
            mine = self._has(one, picked, step, heavier=heavier)
            found = np.where(mine, np.maximum(found, one.limit()), found)
        return found

    def _has(self, one: Wanted, picked: Picked, step: int, *, heavier: bool) -> Mask:
        if one.column is None:
            return np.ones(len(picked), dtype=np.bool_)
        rungs = {"recompute": self._again, "offload": self._away}
        if one.column in rungs:
            held = np.isin(rungs[one.column], one.values)
            return np.asarray((held | held.any() if heavier else held)[picked.rung])
        frames = self._choices.frames
        if one.column in frames:
            return np.asarray(np.isin(frames[one.column], one.values)[picked.frames])
        return np.asarray(self._choices.among(one.column, one.values, step)[picked.at])

    def _code(self, rows: Picked, rung: Ids) -> Ids:
        """A number for every plan; those of a frame are neighbours."""
        return (rows.frames * self._choices.count + rows.at) * len(self._again) + rung

    def _on(self, picked: Picked, step: int) -> PlanTable:
        table = self._choices.table(picked, step)
        return replace(table, recompute=self._again[picked.rung], offload=self._away[picked.rung])

    def _below(
        self, picked: Picked, step: int, wanted: Sequence[Wanted], floor: Callable[[PlanTable, Ids], Floats]
    ) -> Picked:
        """Those of `picked` of which some plan that is wanted may score below its limit."""
        limits = self._limits(picked, step, wanted, heavier=True)
        if not np.isfinite(limits).any() and self._floors.within == np.inf:
            return picked.take(limits > -np.inf)
        return picked.take(floor(self._on(picked, step), picked.frames) < limits)

    def _rows(self, picked: Picked, wanted: Sequence[Wanted]) -> Picked:
        """Plans with the schedules `picked` that may fit where state is sharded over all ranks that it may be, and may
        be below their limits for what they hold."""
        picked = self._choices.after(picked, SHARDING)
        limits = self._limits(picked, SHARDING, wanted)
        picked, limits = picked.take(limits > -np.inf), limits[limits > -np.inf]
        if not len(picked):
            return picked
        table = self._on(picked, SHARDING)
        if self._floors.of_bytes:
            light = self._floors.states(table) < limits
            picked, limits, table = picked.take(light), limits[light], table.take(light)
        total = self._floors.roughly(table, picked.frames)
        fits = self._floors.likely(total, table) > 0.0
        self.hopeless += int(self._choices.plans(picked.take(~fits), SHARDING).sum())
        picked = self._choices.after(picked.take(fits & (self._floors.held(total) < limits)), PLAN)
        return picked.take(self._limits(picked, PLAN, wanted) > -np.inf)

    def _best_first(
        self, rows: Picked, keep: Callable[[PlanTable], Mask], wanted: Sequence[Wanted]
    ) -> tuple[Picked, Picked, Picked]:
        """Prices those of `rows` that may be below their limits, the most promising first: they, those that fit, and
        those that are above wherever they fit, whatever more they compute again or carry."""
        if not len(rows):
            return rows, rows, rows
        table = self._on(rows, PLAN)
        if self._floors.of_bytes:  # what is above for its bytes may hold less when it computes more again
            slow = self._floors.slow(table, rows.frames)
            slower, rows, table = rows.take(slow), rows.take(~slow), table.take(~slow)
            floor = self._floors.own(table, rows.frames)
        else:
            floor = self._floors.own(table, rows.frames)
            slower = rows.take(floor >= self._limits(rows, PLAN, wanted, heavier=True))
        left = np.flatnonzero(floor < self._limits(rows, PLAN, wanted))
        left = left[self._allows(table.take(left))]
        some = table.take(left)
        likely = self._floors.likely(self._floors.bytes(some, rows.frames[left]), some)
        self.hopeless += int(np.count_nonzero(likely == 0.0))
        left, likely = left[likely > 0.0], likely[likely > 0.0]
        floor[left] /= likely
        left = left[np.argsort(floor[left], kind="stable")]
        priced, fits, size = [left[:0]], [left[:0]], FIRST
        while True:
            left = left[floor[left] < self._limits(rows.take(left), PLAN, wanted)]
            if not len(left):
                return rows.take(np.concatenate(priced)), rows.take(np.concatenate(fits)), slower
            now, left, size = left[:size], left[size:], min(2 * size, MOST)
            priced.append(now)
            fits.append(now[keep(table.take(now))])


def _among(values: Ids, known: Ids) -> Mask:
    """Which of `values` are in `known`, which is sorted: faster than np.isin where neighbours lie beside each other."""
    at = np.searchsorted(known, values)
    return np.asarray(np.append(known, -1)[at] == values)
