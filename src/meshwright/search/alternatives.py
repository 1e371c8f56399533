"""Plans that differ from the best in one dimension: those of every dimension looked for together, near what is known
first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshwright.search.explore import Explorer
from meshwright.search.wanted import Wanted
from meshwright.spec.job import Objective

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MOST = 50_000  # plans that may be better and are weighed for one line: where there are more, lines say so
LEAST = 10_000  # of those, in the order of their bounds, that are weighed for a line all the same
MORE = 4_000_000  # weighed of such lines together where memory or cost is least: frames that are near tell less of them
_RUNGS = ("recompute", "offload")


class Alternatives:
    """Plans with one of `values` in the column `name`, of those that are priced in `found`; others are looked for while
    they may score less than `below`."""

    def __init__(self, found: Explorer, *, name: str, values: tuple[int, ...], below: float = np.inf) -> None:
        self.found, self.name, self.values, self.below = found, name, values, below
        self._known, self._rows, self._score = 0, np.zeros(0, dtype=np.int64), below

    def on(self, found: Explorer, *, below: float) -> Alternatives:
        """The same that are priced in `found`."""
        return Alternatives(found, name=self.name, values=self.values, below=below)

    @property
    def rows(self) -> Ids:
        """Those that fit, in the order in which they were priced."""
        self._look()
        return self._rows

    @property
    def score(self) -> float:
        """Of the best that fits; `below` where none that is better was priced."""
        self._look()
        return self._score

    def _look(self) -> None:
        """Takes in what was priced since it was asked for last."""
        if self._known == self.found.priced:
            return
        new = slice(self._known, None)
        table, prices = self.found.table.take(new), self.found.prices.take(new)
        mine = np.isin(getattr(table, self.name), self.values) & prices.fits & prices.finite
        scores = self.found.score(table, prices)
        mine &= scores < np.inf
        self._rows = np.concatenate([self._rows, self._known + np.flatnonzero(mine)])
        self._score = float(np.min(scores[mine], initial=self._score))
        self._known = self.found.priced

    @property
    def is_known(self) -> bool:
        """Whether no plan can be better than the best that was priced."""
        return self.name not in _RUNGS and self.score <= self.found.settled

    @property
    def wanted(self) -> Wanted:
        return Wanted(limit=lambda: self.score, column=self.name, values=self.values)


def settle(found: Explorer, asked: Sequence[Alternatives]) -> list[bool]:
    """Prices what may hold better plans of any of `asked` than are known; False of those of which not all was weighed.

    Of frames near the best plan of all and the best of each first, then from those near what that finds until it finds
    no better, and then in the order of their bounds: all that may be better, or LEAST of them where they are many.
    """
    left = [one for one in asked if not one.is_known]
    first = _near(found, left)
    _approach(found, left, near=first, seen=first)
    rest = [one for one in left if found.weight(one.wanted, among=~first) > MOST]
    before = [one.score for one in rest]
    for one in rest:
        found.until(one.wanted, among=~first, most=min(LEAST, MOST))
    moved = [one for one, score in zip(rest, before, strict=True) if one.score < score]
    _approach(found, moved, near=_near(found, moved) & ~first, seen=first)
    sure = [one for one in left if found.weight(one.wanted, among=~first) <= MOST]
    if sure:
        found.until(*(one.wanted for one in sure), among=~first)
    rest = [one for one in left if one not in sure]
    if rest and found.job.objective is not Objective.TIME:
        weighed = found.until(*(one.wanted for one in rest), among=~first, most=MORE)
        sure += [one for one, whole in zip(rest, weighed, strict=True) if whole]
    return [one not in left or one in sure for one in asked]


def _approach(found: Explorer, moving: Sequence[Alternatives], *, near: Mask, seen: Mask) -> None:
    """Prices the frames `near` what is known of `moving`, and those near what that finds, until it finds no better."""
    while near.any():
        before = [one.score for one in moving]
        found.until(*(one.wanted for one in moving), among=near)
        moving = [one for one, score in zip(moving, before, strict=True) if one.score < score]
        seen = seen | near
        near = _near(found, moving) & ~seen


def _near(found: Explorer, asked: Sequence[Alternatives]) -> Mask:
    """Frames near the best plan of all and the best of each of `asked`; none where nothing is asked."""
    near = np.zeros(len(found.space.keys), dtype=np.bool_)
    if asked and found.priced:
        scores, prices = found.scores(), found.prices
        fitting = [np.flatnonzero(prices.fits & prices.finite), *(one.rows for one in asked)]
        near[found.near([int(rows[np.argmin(scores[rows])]) for rows in fitting if len(rows)])] = True
    return near
