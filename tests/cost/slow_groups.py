"""Which devices of the slow simulator meet in every collective."""

from __future__ import annotations

from itertools import product

from meshwright.spec.plan import AxisName, Plan


class Groups:
    """Lists of device numbers, those of the first coordinate on every axis that a collective does not span.

    `stages` has the devices of each pipeline rank; the others are of rank 0 and do for all. `grid` is the expert and
    the tensor degree of expert layers (0 and 0 without experts), `divided` and `grid_divided` in how many parts
    a dense and an expert parameter are kept, `outer` the context ranks that do not trade heads.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sizes = {axis.name: axis.size for axis in plan.axes}
        self.grid = (plan.experts.expert, plan.experts.tensor) if plan.experts else (0, 0)
        self.outer = plan.context // plan.exchange.inner
        self.divided = plan.shard * plan.context
        self.grid_divided = max(self.divided * plan.tensor // max(self.grid[0] * self.grid[1], 1), 1)
        whole = {name.value: range(size) for name, size in self.sizes.items()}
        stage = {name: span for name, span in whole.items() if name != AxisName.PIPELINE}
        shards = {name: span for name, span in whole.items() if name in (AxisName.SHARD, AxisName.CONTEXT)}
        replicate = whole.get("replicate", range(1))
        self.tensor = self._members(tensor=whole.get("tensor", range(1)))
        self.shards, self.replicas = self._members(**shards), self._members(replicate=replicate)
        self.data, self.everyone = self._members(**shards, replicate=replicate), self._members(**whole)
        self.traders = self._members(context=range(plan.exchange.inner))
        self.runs = self._members(context=range(0, plan.context, plan.exchange.inner))
        self.stages = [self._members(**stage, pipeline=range(rank, rank + 1)) for rank in range(plan.pipeline)]
        here, cells, slices = self.stages[0], max(self.grid[0] * self.grid[1], 1), max(self.grid[1], 1)
        self.slices, self.holders = here[:slices], here[:cells:slices]
        self.grid_shards, self.grid_data = here[: cells * self.grid_divided : cells], here[::cells]
        self.grid_replicas = here[:: cells * self.grid_divided]

    def _members(self, **ranges: range) -> list[int]:
        """Devices whose coordinate on each axis is in its range: 0 alone on axes that have none."""
        found = []
        for place in product(*(ranges.get(name.value, range(1)) for name in self.sizes)):
            index = 0
            for size, coordinate in zip(self.sizes.values(), place, strict=True):
                index = index * size + coordinate
            found.append(index if self.plan.placement is None else self.plan.placement[index])
        return found
