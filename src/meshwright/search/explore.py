"""Exploring a space: frames priced in the order of what they promise, until no other can hold a better plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.bound import least_bytes
from meshwright.search.candidate import LEAST_LIKELY
from meshwright.search.choices import Choices
from meshwright.search.floors import Floors
from meshwright.search.ladder import Ladder, Other
from meshwright.search.prices import Prices, may_fit, price
from meshwright.search.space import Space
from meshwright.search.trainer import Held, Trainer
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
EXHAUSTIVE = 100_000  # plans that are all priced: less time than a person notices
BATCH = 4_000  # plans weighed at a time while none is known to fit; then each time GROWTH times as many
GROWTH = 8
LARGEST = 4_000_000
KEPT = 1_000  # of the best scores: as many plans may be asked for
SURE = 0.99  # to fit: no plan that recomputes or offloads more is better than one that is
PATIENCE = 300_000  # plans weighed without one that fits, before the lightest of every frame are
FRAMES = 2_000  # whose lightest plans are weighed at a time
CLOSEST = 20  # frames of which plans are priced that do not fit, where none does


class Explorer:
    """What has been priced of a space so far: rows of `table` with their `prices` and `score`, the less the better."""

    def __init__(
        self,
        space: Space,
        *,
        model: ModelSpec,
        cluster: ClusterSpec,
        job: JobSpec,
        trainer: Trainer | None = None,
        exhaustive: int = EXHAUSTIVE,
    ) -> None:
        """Spaces of up to `exhaustive` plans are priced whole, but what `trainer` has no words for."""
        self.held = Held(trainer, model=model, cluster=cluster, job=job)
        self._small = space.count <= exhaustive
        self.space = space
        self.model, self.cluster, self.job = model, cluster, job
        self.hopeless = 0
        self._best: Floats = np.zeros(0)
        self._tables: list[PlanTable] = []
        self._prices: list[Prices] = []
        self._left = np.ones(len(space.keys), dtype=np.bool_)
        self._reached = np.zeros(len(space.keys))  # the score below which plans of a frame were priced
        self._room = max(group.device.memory_bytes * group.device.usable_fraction for group in cluster.groups)
        if not self._small:
            self._drop(np.flatnonzero(least_bytes(space, model=model, job=job) > self._room))

    @cached_property
    def _floors(self) -> Floors:
        return Floors(self.space, model=self.model, cluster=self.cluster, job=self.job)

    @cached_property
    def _bounds(self) -> Floats:
        """What `score` is at the least in every frame."""
        return self._floors.frames()

    @property
    def table(self) -> PlanTable:
        if len(self._tables) > 1:
            self._tables = [PlanTable.joined(self._tables)]
        return self._tables[0]

    @property
    def prices(self) -> Prices:
        if len(self._prices) > 1:
            self._prices = [Prices.joined(self._prices)]
        return self._prices[0]

    @property
    def priced(self) -> int:
        return sum(len(part) for part in self._prices)

    @property
    def fitting(self) -> int:
        """Plans priced that fit."""
        return sum(int(np.count_nonzero(part.fits & part.finite)) for part in self._prices)

    def scores(self) -> Floats:
        """What the objective minimises, of every row priced; infinite where nothing is known."""
        return self.score(self.table, self.prices)

    def score(self, table: PlanTable, prices: Prices) -> Floats:
        """Seconds of a step or device-seconds at the cautious end of their interval, or bytes at the peak.

        Seconds are over the probability of fitting: a plan that fits half the time is tried, and given up, as often as
        it runs. Ties of memory go to the faster plan.
        """
        if self.job.objective is Objective.MEMORY:
            value = prices.memory_bytes + 0.5 * prices.step_seconds / (1.0 + prices.step_seconds)
        else:
            expected = prices.upper_seconds / np.maximum(prices.fit_probability, LEAST_LIKELY)
            value = expected * (table.world if self.job.objective is Objective.COST else 1.0)
        return np.where(prices.finite, value, np.inf)

    def best(self, count: int, *, slack: float = 1.0) -> None:
        """Prices plans until the `count` best that fit are known, and all whose scores are within `slack` of theirs."""
        if self._small:
            self._price(np.flatnonzero(self._left), enough=lambda: float("inf"))
            return
        self.until(lambda: slack * self._at(min(count, KEPT)))
        if not self._prices:
            self._keep_the_closest()

    def until(
        self,
        enough: Callable[[], float],
        *,
        among: Mask | None = None,
        other: Other | None = None,
        most: int | None = None,
    ) -> bool:
        """Prices plans, of the frames of `among` and those that `other` asks for, until none left can score below
        `enough()`.

        False where `most` plans were weighed before.
        """
        asked = self._left if among is None else self._left & among
        order = np.flatnonzero(asked)
        order = order[np.argsort(self._bounds[order], kind="stable")]
        ends = np.cumsum(self.space.plain.sizes[order])
        start, rows, asked_lightest = 0, BATCH, False
        while start < len(order):
            limit = enough()
            if self._bounds[order[start]] >= limit:
                return True
            done = int(ends[start - 1]) if start else 0
            if most is not None and done >= most:
                return False
            if not np.isfinite(limit) and done > PATIENCE and not asked_lightest:
                asked_lightest, left = True, np.flatnonzero(self._left)
                self._drop(left[self._lightest_bytes(left) > self._room])
            rows = min(rows * (GROWTH if np.isfinite(limit) else 2), LARGEST if most is None else most)
            stop = max(start + 1, int(np.searchsorted(ends, done + rows)))
            batch = order[start:stop]
            batch = batch[self._left[batch] & (self._bounds[batch] < limit)]
            batch = batch if other is not None else batch[self._reached[batch] < limit]
            if len(batch):
                self._price(batch, enough=enough, other=other)
            start = stop
        return True

    @property
    def settled(self) -> float:
        """The score below which every plan is priced that fits, but those that only compute or carry more than one."""
        left = np.flatnonzero(self._left)
        return float(np.min(np.maximum(self._bounds[left], self._reached[left]), initial=np.inf))

    def _price(self, frames: Ids, *, enough: Callable[[], float], other: Other | None = None) -> None:
        """Prices the plans of `frames` that may fit and may be below `enough()`."""
        if self._small:
            self._left[frames] = False
            table = self.space.table if len(frames) == len(self.space.keys) else self.space.rows_of(frames)
            table = table.take(self.held.allows(table))
            possible = may_fit(table, model=self.model, cluster=self.cluster, job=self.job)
            possible = possible if possible.any() else ~possible
            self.hopeless += int(np.count_nonzero(~possible))
            self._keep(table.take(possible))
            return
        before, new = self._ladder.hopeless, other is None and not self._reached[frames].any()
        every = self.job.objective is Objective.MEMORY or other is not None
        self._ladder.climb(frames, self._keep, enough, every=every, other=other)
        self.hopeless += self._ladder.hopeless - before if new else 0
        if other is None:
            self._reached[frames] = enough()

    @cached_property
    def _ladder(self) -> Ladder:
        return Ladder(Choices(self.space), self.space.rungs, floors=self._floors, allows=self.held.allows)

    def _keep(self, table: PlanTable) -> Mask:
        """Prices the rows of `table` and keeps them; which of them surely fit."""
        if not len(table):
            return np.zeros(0, dtype=np.bool_)
        prices = price(table, model=self.model, cluster=self.cluster, job=self.job)
        self.add(table, prices)
        return np.asarray(prices.fits & (prices.fit_probability >= SURE), dtype=np.bool_)

    def add(self, table: PlanTable, prices: Prices) -> None:
        """Keeps rows and what was found to be their prices."""
        self._tables.append(table)
        self._prices.append(prices)
        fitting = self.score(table, prices)[prices.fits]
        self._best = np.sort(np.concatenate([self._best, fitting]))[:KEPT]

    def _at(self, count: int) -> float:
        """The score of the `count`-th best plan that fits; infinite while there are fewer."""
        return float(self._best[count - 1]) if len(self._best) >= count else float("inf")

    def _lightest_bytes(self, frames: Ids) -> Floats:
        """What the plans that hold least hold in each of `frames`: the smallest microbatch, all that can be sharded
        sharded widest, one stage a rank, whatever is recomputed and offloaded."""
        light, found = self.space.lightest, np.full(len(frames), np.inf)
        for start in range(0, len(frames), FRAMES):
            some = frames[start : start + FRAMES]
            counts = light.sizes[some]
            held = self._floors.bytes(light.rows_of(some), light.frame_of(some), ranks=1)
            least = np.minimum.reduceat(held, (np.cumsum(counts) - counts)[counts > 0]) if len(held) else held
            found[start : start + FRAMES][counts > 0] = least
        return found

    def _keep_the_closest(self) -> None:
        """Prices some plans that do not fit, those that hold least, where none does."""
        frames = np.argsort(least_bytes(self.space, model=self.model, job=self.job), kind="stable")[:FRAMES]
        closest = frames[np.argsort(self._lightest_bytes(frames), kind="stable")[:CLOSEST]]
        table = self.space.lightest.rows_of(closest)
        self._keep(table.take(self.held.allows(table)))

    def _drop(self, refused: Ids) -> None:
        """Leaves out frames of which no plan fits."""
        self.hopeless += int(self.space.sizes[refused].sum())
        self._left[refused] = False
