"""Outer products of plan columns that grow one choice at a time and lose what a rule refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost.table import EXCHANGES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS, TOKEN_LAYOUTS
from meshwright.search.constraints import Limits
from meshwright.spec.synchronize import MEETINGS

Columns = dict[str, npt.NDArray[np.int64]]
Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]
WORDS: Mapping[str, Sequence[str]] = {
    "schedule": [kind.value for kind in SCHEDULES],
    "sharding": [kind.value for kind in SHARDINGS],
    "recompute": [kind.value for kind in RECOMPUTES],
    "offload": [kind.value for kind in OFFLOADS],
    "exchange": [kind.value for kind in EXCHANGES],
    "token_layout": [layout.value for layout in TOKEN_LAYOUTS],
    "sequence_parallel": ["off", "on"],
    "precision": [kind.value for kind in PRECISIONS],
    "sync": MEETINGS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """`count` combinations refused by `rule` at the step of the search that asks it, and one of them in words."""

    rule: str
    count: int
    example: str


class Product:
    """Rows of columns; one row without columns at first."""

    def __init__(self, asked: Limits, columns: Columns | None = None) -> None:
        self.columns: Columns = dict(columns or {})
        self.asked = asked
        self.rejections: dict[str, Rejection] = {}

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        return self.columns[name]

    @property
    def rows(self) -> int:
        return next(iter(self.columns.values())).shape[0] if self.columns else 1

    def times(self, names: Sequence[str], values: Sequence[Sequence[int]]) -> None:
        """Cross every row with every entry of `values`, one entry naming a value for each of `names`."""
        added = np.array(values, dtype=np.int64).reshape(len(values), len(names))
        rows = self.rows
        self.columns = {name: np.repeat(column, len(added)) for name, column in self.columns.items()}
        for index, name in enumerate(names):
            self.columns[name] = np.tile(added[:, index], rows)

    def join(self, names: Sequence[str], keys: Ids, options: Callable[[int], Sequence[Sequence[int]]]) -> None:
        """Cross every row with the entries that `options` gives for its key."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        found = [np.array(options(int(key)), dtype=np.int64).reshape(-1, len(names)) for key in distinct]
        sizes = np.array([len(entry) for entry in found], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes
        counts = sizes[inverse] if len(sizes) else sizes
        whole = int(counts.sum())
        within = np.arange(whole) - np.repeat(np.cumsum(counts) - counts, counts)
        picked = np.repeat(starts[inverse] if len(sizes) else sizes, counts) + within
        values = np.concatenate(found) if found else np.zeros((0, len(names)), dtype=np.int64)
        self.columns = {name: np.repeat(column, counts) for name, column in self.columns.items()}
        for index, name in enumerate(names):
            self.columns[name] = values[picked, index]

    def keep(self, mask: Mask, rule: str | None = None) -> None:
        """Keep the rows of the mask; with a rule, count the others under its name."""
        refused = int(mask.size - np.count_nonzero(mask))
        if refused and rule is not None:
            self._refuse(rule, refused, example=self.describe(int(np.argmin(mask))))
        if refused:
            self.columns = {name: column[mask] for name, column in self.columns.items()}

    def refuse_with_each(self, other: Product) -> None:
        """Count what `other` refused with every row here."""
        for entry in other.rejections.values() if self.rows else ():
            self._refuse(entry.rule, entry.count * self.rows, example=f"{self.describe(0)}, {entry.example}")

    def _refuse(self, rule: str, refused: int, *, example: str) -> None:
        before = self.rejections.get(rule)
        count, example = (refused + before.count, before.example) if before else (refused, example)
        self.rejections[rule] = Rejection(rule=rule, count=count, example=example)

    def constrain(self, name: str, values: npt.NDArray[np.int64], words: Sequence[str] | None = None) -> None:
        """Drop the rows whose value of the constraint column `name` the job refuses."""
        if not self.asked.names(name):
            return
        known = np.unique(values).tolist()
        allowed = [value for value in known if self.asked.allows(name, words[value] if words else value)]
        self.keep(np.isin(values, allowed), "keeps-constraints")

    def describe(self, row: int) -> str:
        return ", ".join(_word(name, int(column[row])) for name, column in self.columns.items())


def merged(found: Sequence[Mapping[str, Rejection]], times: Sequence[int]) -> dict[str, Rejection]:
    """Rejections added up, each mapping counted so many times."""
    total: dict[str, Rejection] = {}
    for rejections, count in zip(found, times, strict=True):
        for rule, entry in rejections.items():
            before = total.get(rule)
            number = entry.count * count + (before.count if before else 0)
            total[rule] = Rejection(rule=rule, count=number, example=before.example if before else entry.example)
    return total


def _word(name: str, value: int) -> str:
    words = WORDS.get(name)
    return f"{name.replace('_', ' ')} {words[value] if words else value}"
