"""Exploring a space: frames priced in the order of what they promise, until no other can hold a better plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.candidate import LEAST_LIKELY
from meshwright.search.choices import Choices
from meshwright.search.floors import Floors
from meshwright.search.ladder import Ladder
from meshwright.search.prices import Prices, may_fit, price
from meshwright.search.space import Space
from meshwright.search.states_held import least_bytes
from meshwright.search.trainer import Held, Trainer
from meshwright.search.wanted import Wanted
from meshwright.search.worth import worth_of_rows
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
EXHAUSTIVE = 100_000  # plans that are all priced: less time than a person notices
BATCH = 4_000  # plans weighed at a time while none is known to fit; then each time GROWTH times as many
GROWTH = 64
LARGEST = 4_000_000
FIRST = 500  # plans weighed first where bytes are minimised, whose bounds are close; then each time MORE times as many
MORE = 4
KEPT = 1_000  # of the best scores: as many plans may be asked for
SURE = 0.99  # to fit: no plan that recomputes or offloads more is better than one that is
PATIENCE = 300_000  # plans weighed without one that fits, before the lightest of every frame are
FRAMES = 2_000  # of which those are looked for that hold least, where no plan fits
NEAR = 24  # frames near plans that are known
STEP = 2.0  # doublings by which the axes of a frame that is near differ in all
CLOSER = 0.97  # of the best score: frames near it are priced while they hold a plan that is better by so much
CLOSEST = 20  # frames of which plans are priced that do not fit, where none does
_AXES = ("tensor", "context", "pipeline", "data")
_ALIKE = (*_AXES, "expert", "precision")


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
        below: float = np.inf,
        within: float = np.inf,
    ) -> None:
        """Spaces of up to `exhaustive` plans are priced whole, but what `trainer` has no words for. Of others no plan
        is asked for whose score is not `below`. A plan whose step may take longer than `within` seconds, as `expected`
        tells them, has no score."""
        self.held = Held(trainer, model=model, cluster=cluster, job=job)
        self._small = space.count <= exhaustive and below == np.inf
        self.space = space
        self.model, self.cluster, self.job = model, cluster, job
        self.hopeless, self.below, self.within = 0, below, within
        self.turned: Ids = np.zeros(0, dtype=np.int64)  # rows whose axes were tried in other orders
        self._best: Floats = np.zeros(0)
        self._nearest = np.inf
        self._tables: list[PlanTable] = []
        self._prices: list[Prices] = []
        self._left = np.ones(len(space.keys), dtype=np.bool_)
        self._reached = np.zeros(len(space.keys))  # the score below which plans of a frame were priced
        self._room = max(group.device.memory_bytes * group.device.usable_fraction for group in cluster.groups)
        if not self._small:
            self._drop(np.flatnonzero(least_bytes(space, model=model, job=job) > self._room))

    @cached_property
    def _floors(self) -> Floors:
        return Floors(self.space, model=self.model, cluster=self.cluster, job=self.job, within=self.within)

    @cached_property
    def bounds(self) -> Floats:
        """What `score` is at the least in every frame."""
        return self._floors.frames(self._left)

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
        """`expected` seconds of a step, device-seconds, or bytes at the peak, ties of which go to the faster plan;
        infinite where the step may take longer than it is to."""
        expected = self.expected(table, prices)
        if self.job.objective is Objective.MEMORY:
            value = prices.memory_bytes + 0.5 * prices.step_seconds / (1.0 + prices.step_seconds)
        else:
            value = expected * (table.world if self.job.objective is Objective.COST else 1.0)
        return np.where(prices.finite & (expected <= self.within), value, np.inf)

    def expected(self, table: PlanTable, prices: Prices) -> Floats:
        """Seconds of a step at the cautious end of their interval, over the probability of fitting: a plan that fits
        half the time is tried, and given up, as often as it runs. Those of learners, or of compressed gradients, count
        for more, as they take more steps to the same loss."""
        expected = prices.upper_seconds / np.maximum(prices.fit_probability, LEAST_LIKELY)
        return np.asarray(expected * worth_of_rows(table, parameters=self.model.parameters))

    def best(self, count: int, *, slack: float = 1.0) -> None:
        """Prices plans until the `count` best that fit are known, and all whose scores are within `slack` of theirs; of
        those that are asked for."""
        if self._small:
            if self._left.any():
                self._left[:] = False
                self._price_whole()
            return
        self.until(Wanted(limit=lambda: min(self.below, slack * self._at(min(count, KEPT)))))
        if not self._prices and self.below == np.inf:
            self._keep_the_closest()

    def until(self, *wanted: Wanted, among: Mask | None = None, most: int | None = None) -> tuple[bool, ...]:
        """Prices plans, of the frames of `among` alone where they are named, until none left that is `wanted` can score
        below its limit.

        Of each of `wanted` whether that is so: not where `most` plans were weighed before.
        """
        order = np.flatnonzero(self._left if among is None else self._left & among)
        order = order[np.argsort(self.bounds[order], kind="stable")]
        whole = all(one.column is None for one in wanted)
        of_bytes = self.job.objective is Objective.MEMORY
        weighed, rows, asked_lightest = 0, FIRST // MORE if of_bytes else BATCH, False
        while len(order := self._promising(order, wanted, whole=whole)):
            if most is not None and weighed >= most:
                break
            known = np.isfinite(max(one.limit() for one in wanted))
            if whole and known and self._descend(wanted):
                continue
            if not known and weighed > PATIENCE and not asked_lightest:
                asked_lightest, left = True, np.flatnonzero(self._left)
                self._drop(left[self._floors.lightest(left) > self._room])
                continue
            grown = MORE if of_bytes else GROWTH if known else 2
            rows = min(rows * grown, LARGEST if most is None else most)
            ends = np.cumsum(self.space.plain.sizes[order])
            stop = max(1, int(np.searchsorted(ends, rows)))
            batch, order, weighed = order[:stop], order[stop:], weighed + int(ends[stop - 1])
            self._price(batch, wanted, whole=whole)
        return tuple(not len(self._promising(order, [one], whole=False)) for one in wanted)

    def _descend(self, wanted: Sequence[Wanted]) -> bool:
        """Prices frames near the best plan that is known, where those near the best before were not; False else."""
        if not self._at(1) < CLOSER * self._nearest:
            return False
        self._nearest = self._at(1)
        best = int(np.argmin(np.where(self.prices.fits, self.scores(), np.inf)))
        near = self._promising(self.near([best]), wanted, whole=True)
        if len(near):
            self._price(near, wanted, whole=True)
        return True

    def near(self, rows: Sequence[int]) -> Ids:
        """At most NEAR frames near those of `rows`, those of least bounds: of frames that divide the model alike the
        one of the least."""
        frames, near = self.space.frames, np.zeros(len(self.space.keys), dtype=np.bool_)
        for row in rows:
            apart = np.zeros(len(near))
            for name in _AXES:
                apart += np.abs(np.log2(frames[name] / getattr(self.table, name)[row]))
            near |= apart <= STEP + 1e-9
        chosen = np.flatnonzero(near)
        chosen = chosen[np.argsort(self.bounds[chosen], kind="stable")]
        _, first = np.unique(np.stack([frames[name][chosen] for name in _ALIKE]), axis=1, return_index=True)
        return chosen[np.sort(first)[:NEAR]]

    def weight(self, wanted: Wanted, *, among: Mask) -> int:
        """Plans, but for recompute and offload, of the frames of `among` of which one that is `wanted` may be below its
        limit."""
        return int(self.space.plain.sizes[self._promising(np.flatnonzero(among), [wanted], whole=False)].sum())

    def _promising(self, frames: Ids, wanted: Sequence[Wanted], *, whole: bool) -> Ids:
        """Those of `frames` of which a plan that is wanted may score below its limit; `whole`: and was not priced."""
        limits = np.full(len(frames), -np.inf)
        for one in wanted:
            column = self.space.frames.get(one.column or "")
            mine = np.isin(column[frames], one.values) if column is not None else np.ones(len(frames), dtype=np.bool_)
            limits = np.where(mine, np.maximum(limits, one.limit()), limits)
        below = self.bounds[frames] < limits
        if whole:
            below &= self._reached[frames] < limits
        return frames[below & self._left[frames]]

    @property
    def settled(self) -> float:
        """The score below which every plan is priced that fits, but those that only compute or carry more than one."""
        left = np.flatnonzero(self._left)
        return float(np.min(np.maximum(self.bounds[left], self._reached[left]), initial=np.inf))

    def _price_whole(self) -> None:
        """Prices every plan that may fit, of a space that is small."""
        table = self.space.table
        table = table.take(self.held.allows(table))
        possible = may_fit(table, model=self.model, cluster=self.cluster, job=self.job)
        possible = possible if possible.any() else ~possible
        self.hopeless += int(np.count_nonzero(~possible))
        self._keep(table.take(possible))

    def _price(self, frames: Ids, wanted: Sequence[Wanted], *, whole: bool) -> None:
        """Prices the plans of `frames` that are `wanted`, may fit and may be below their limit."""
        before, new = self._ladder.hopeless, whole and not self._reached[frames].any()
        every = self.job.objective is Objective.MEMORY or not whole
        self._ladder.climb(frames, self._keep, wanted, every=every)
        self.hopeless += self._ladder.hopeless - before if new else 0
        if whole:
            self._reached[frames] = max(one.limit() for one in wanted)

    @cached_property
    def _ladder(self) -> Ladder:
        return Ladder(Choices(self.space), self.space.rungs, floors=self._floors, allows=self.held.allows)

    def _keep(self, table: PlanTable) -> Mask:
        """Prices the rows of `table` and keeps them; which of them surely fit."""
        if not len(table):
            return np.zeros(0, dtype=np.bool_)
        prices = price(table, model=self.model, cluster=self.cluster, job=self.job)
        self.add(replace(table, every=prices.every) if table.has_learners else table, prices)
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

    def _keep_the_closest(self) -> None:
        """Prices some plans that do not fit, those that hold least, where none does."""
        frames = np.argsort(least_bytes(self.space, model=self.model, job=self.job), kind="stable")[:FRAMES]
        closest = frames[np.argsort(self._floors.lightest(frames), kind="stable")[:CLOSEST]]
        table = self.space.lightest.rows_of(closest)
        self._keep(table.take(self.held.allows(table)))

    def _drop(self, refused: Ids) -> None:
        """Leaves out frames of which no plan fits."""
        self.hopeless += int(self.space.sizes[refused].sum())
        self._left[refused] = False
