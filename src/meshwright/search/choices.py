"""What may be chosen inside frames, step by step: a microbatch, a schedule, what is sharded, and over which ranks.

A bound that holds for all plans of one step leaves them out before they are written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.table import PRECISIONS
from meshwright.search.space import Space

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MICROBATCH, SCHEDULE, SHARDING, PLAN = range(4)
_SORTED = ("key", "microbatch", "schedule", "chunks", "slices", "sharding", "shard")
_RUNGS = ("recompute", "offload")
_STEPS = (_SORTED[:2], _SORTED[:5], _SORTED[:6])


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Choices of frames, one an entry: `at` is an index into the choices of one step, `rung` into those of recompute
    and offload."""

    frames: Ids
    at: Ids
    rung: Ids

    def __len__(self) -> int:
        return len(self.at)

    def take(self, chosen: Mask | Ids) -> Picked:
        return Picked(frames=self.frames[chosen], at=self.at[chosen], rung=self.rung[chosen])

    def times(self, rungs: Sequence[int]) -> Picked:
        """Every entry on each of `rungs`."""
        size = len(self)
        return replace(self.take(np.tile(np.arange(size), len(rungs))), rung=np.repeat(np.array(rungs), size))


class Choices:
    """All choices of a space with the least recompute and offload, those of one frame's key side by side.

    Of all that follow from a choice of an early step, the one whose state is sharded most and most widely stands for
    them.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        keys = sorted(space.inner)
        parts = [space.plain.inner[key].crossed() for key in keys]
        number = {key: index for index, key in enumerate(keys)}
        self._key = np.array([number[int(key)] for key in space.keys], dtype=np.int64)
        sizes = [len(part["microbatch"]) for part in parts]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns["key"] = np.repeat(np.arange(len(keys)), sizes)
        columns["pipeline"] = np.repeat(_by_key(space.frames["pipeline"], self._key, len(keys)), sizes)
        order = np.lexsort([columns[name] for name in reversed(_SORTED)])
        self._columns = {name: values[order] for name, values in columns.items()}
        self._ends = [_runs(self._columns, names) for names in _STEPS] + [np.arange(1, len(order) + 1)]
        self._of_key = [
            np.searchsorted(self._columns["key"][ends - 1], np.arange(len(keys) + 1)) for ends in self._ends
        ]
        self.count = len(order)
        self._among: dict[tuple[str, tuple[int, ...], int], Mask] = {}
        self.frames = space.frames
        self._layout: dict[int, Ids] = {}
        self._balanced = space.lies.of * len(PRECISIONS) + space.frames["precision"]

    def of(self, frames: Ids) -> Picked:
        """What the first step may pick in `frames`."""
        first, last = (self._of_key[MICROBATCH][self._key[frames] + shift] for shift in (0, 1))
        entry, at = _spread(first, last)
        return Picked(frames=frames[entry], at=at, rung=np.zeros(len(at), dtype=np.int64))

    def after(self, picked: Picked, step: int) -> Picked:
        """What `step` may pick after `picked` of the step before."""
        ends, inner = self._ends[step - 1], self._ends[step]
        starts = np.concatenate([[0], ends[:-1]])
        first, last = (np.searchsorted(inner, edge[picked.at], side="right") for edge in (starts, ends - 1))
        entry, at = _spread(first, last + 1)
        return replace(picked.take(entry), at=at)

    def among(self, column: str, values: Sequence[int], step: int) -> Mask:
        """Choices of `step` after which some plan has one of `values` in `column`; all where none here decides."""
        key = (column, tuple(values), step)
        if key not in self._among:
            mine = np.ones(self.count, dtype=np.bool_)
            if column in self._columns and column not in _RUNGS:
                mine = np.isin(self._columns[column], values)
            self._among[key] = np.logical_or.reduceat(mine, np.concatenate([[0], self._ends[step][:-1]]))
        return self._among[key]

    def plans(self, picked: Picked, step: int) -> Ids:
        """How many plans follow from each of `picked`."""
        ends = self._ends[step]
        return ends[picked.at] - np.where(picked.at > 0, ends[picked.at - 1], 0)

    def table(self, picked: Picked, step: int) -> PlanTable:
        """The plan that stands for each of `picked`."""
        rows = self._ends[step][picked.at] - 1
        names = (name for name in self._columns if name not in ("key", "pipeline"))
        columns: dict[str, npt.ArrayLike] = {name: self._columns[name][rows] for name in names}
        columns |= {name: values[picked.frames] for name, values in self._space.frames.items() if name != "data"}
        columns["layout"] = self._layouts(rows, picked.frames)
        return PlanTable.build(columns, layouts=tuple(self._space.made), syncs=self._space.syncs)

    def _layouts(self, rows: Ids, frames: Ids) -> Ids:
        """The layout of every choice of `rows` in the frame beside it."""
        balanced = self._balanced[frames]
        found = np.zeros(len(rows), dtype=np.int64)
        for code in np.flatnonzero(np.bincount(balanced)).tolist():
            if code not in self._layout:
                self._layout[code] = np.full(self.count, -1, dtype=np.int64)
            known, those = self._layout[code], balanced == code
            mine = rows[those]
            missing = np.unique(mine[known[mine] < 0])
            if len(missing):
                alike = {name: values[missing] for name, values in self._columns.items()}
                place, alike["precision"] = code // len(PRECISIONS), np.full(len(missing), code % len(PRECISIONS))
                known[missing] = self._space.layouts_of(alike, lies=np.full(len(missing), place))
            found[those] = known[mine]
        return found


def _by_key(values: Ids, key: Ids, count: int) -> Ids:
    found = np.zeros(count, dtype=np.int64)
    found[key] = values
    return found


def _runs(columns: dict[str, Ids], names: Sequence[str]) -> Ids:
    """Where runs of rows that are alike in `names` end."""
    changed = np.any([columns[name][1:] != columns[name][:-1] for name in names], axis=0)
    return np.append(np.flatnonzero(changed) + 1, len(columns["key"]))


def _spread(first: Ids, last: Ids) -> tuple[Ids, Ids]:
    """Every index from `first` up to but without `last` of each entry, and before it the entry that it is of."""
    counts = last - first
    begin = np.cumsum(counts) - counts
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) + np.repeat(first - begin, counts)
