"""Outlook: what designs alone say of the way from one epoch to the next, worked out once.

Whoever knows who is on the way has it worked out while the others train, so that nobody waits for it when they come.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from meshwright import cost
from meshwright.cost.copies import copied, left_of
from meshwright.cost.holdings import Holding
from meshwright.cost.way import Way
from meshwright.parallel.relocate import STAGING_BYTES
from meshwright.run.elastic.board import Epoch
from meshwright.run.files import load_design
from meshwright.run.outcome import read_report
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Report

_KEPT = 16  # of each kind, the newest


class Outlook:
    """Of one launch, while which the files of designs stay as they are. Any thread may ask."""

    def __init__(self) -> None:
        self._design = lru_cache(_KEPT)(_design_in)
        self._predicted = lru_cache(_KEPT)(self._predict)
        self._left = lru_cache(_KEPT)(self._leave)
        self._way = lru_cache(_KEPT)(self._find_way)

    def design(self, epoch: Epoch) -> Design:
        return self._design(epoch.design)

    def plan(self, epoch: Epoch) -> Plan:
        return self.design(epoch).plan

    def predicted(self, epoch: Epoch) -> Report:
        return self._predicted(epoch.design)

    def ranks(self, epoch: Epoch) -> dict[str, int]:
        """The rank of every member."""
        plan = self.plan(epoch)
        return {name: plan.rank_on(place) for place, name in enumerate(epoch.members)}

    def left(self, before: Epoch, now: Epoch, *, holders: Collection[str]) -> dict[str, Holding]:
        """What `holders` have of a copy of the epoch `before`, by the ranks that they have `now`."""
        return self._left(before.design, self._places(before, now, holders=holders))

    def way(self, before: Epoch, now: Epoch, *, holders: Collection[str]) -> Way | None:
        """From there to what the epoch `now` needs; None where it has learners, of whom that is not all."""
        if self.plan(now).gradients.kind.has_learners or self.plan(before).gradients.kind.has_learners:
            return None
        return self._way(before.design, now.design, self._places(before, now, holders=holders))

    def look_ahead(self, before: Epoch, now: Epoch) -> None:
        """What members of `before` have who have a rank `now`, and the way from there, are known."""
        holders = [name for name in before.members if name in now.members]
        self.left(before, now, holders=holders)
        self.way(before, now, holders=holders)

    def _places(self, before: Epoch, now: Epoch, *, holders: Collection[str]) -> tuple[tuple[int, int], ...]:
        had, has = self.ranks(before), self.ranks(now)
        return tuple(sorted((had[name], has[name]) for name in holders))

    def _predict(self, path: str) -> Report:
        return read_report(Path(path).with_name("predicted.json")) or cost.predict(self._design(path))

    def _leave(self, before: str, places: tuple[tuple[int, int], ...]) -> dict[str, Holding]:
        return left_of(self._design(before), places=dict(places))

    def _find_way(self, before: str, now: str, places: tuple[tuple[int, int], ...]) -> Way:
        return Way.between(self._left(before, places), copied(self._design(now)), staging_bytes=STAGING_BYTES)


def _design_in(path: str) -> Design:
    return load_design(Path(path))
