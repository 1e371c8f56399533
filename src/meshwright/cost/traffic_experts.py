"""What one pass of one microbatch sends between the ranks of a grid of experts, every expert chosen as often."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.cost.traffic_groups import GridGroups, Group
from meshwright.spec.blocks import Mixture
from meshwright.spec.plan import AxisName, Dispatch, Plan
from meshwright.spec.report import LineName

_INTEGER = 8.0  # bytes of a choice or a count

Sent = tuple[LineName, str, tuple[AxisName, ...], float]


def countings(part: Mixture, plan: Plan, *, on_grid: bool, again: bool) -> Iterator[Sent]:
    """Ranks that hold parts of the same sequences tell each other how often those chose each expert, or where tokens of
    one lie between those of another, which experts each of them chose: forward, and computed `again` for backward.

    Without a grid every tensor rank has the tokens of all.
    """
    how, tensor = part.routing, plan.tensor if on_grid else 1
    if how.capacity is None and not how.balance_loss:
        return
    traders = plan.exchange.inner
    levels = [(AxisName.TENSOR, tensor)] if tensor > 1 else []
    levels += [(AxisName.CONTEXT, size) for size in (traders, plan.context // traders) if size > 1]
    counts = part.experts * plan.microbatch * _INTEGER
    tokens = plan.microbatch * plan.sequence_length // (plan.schedule.slices * plan.context * tensor)
    each = counts if plan.context == 1 else tokens * part.top_k * _INTEGER
    for _ in range(1 + again):
        joined = each
        for axis, size in levels:
            joined *= size
            if how.capacity is None:
                yield LineName.OTHER, "all_reduce", (axis,), counts
            else:
                yield LineName.OTHER, "all_gather", (axis,), joined


class Dispatching:
    """The collectives of one mixture on its grid, by how its plan brings `tokens` of a rank to their experts."""

    def __init__(
        self, part: Mixture, grid: GridGroups, plan: Plan, *, tokens: int, itemsize: float, scatter: str
    ) -> None:
        self._part, self._grid, self._plan = part, grid, plan
        self._tokens, self._scatter = tokens, scatter
        self._row = part.width * itemsize
        self._weights = part.top_k * itemsize

    def sent(self, *, again: bool, comes_back: bool, follows: bool) -> Iterator[Sent]:
        """Line, operation, axes and bytes of each, of forward alone unless backward `comes_back`; forward is computed
        `again` for backward, to its end where something `follows` that keeps what it needs."""
        if self._grid.experts.size == self._grid.slices.size == 1:
            return
        assert self._plan.experts is not None
        if self._plan.experts.dispatch is Dispatch.ALL_TO_ALL:
            yield from self._chosen(again, comes_back)
        else:
            yield from self._gathered(again, comes_back, follows)

    def _chosen(self, again: bool, comes_back: bool) -> Iterator[Sent]:
        """Rows go to the ranks of their experts and to all slices of those; what comes of them goes back."""
        experts, slices = self._grid.experts, self._grid.slices
        rows, arrived = self._rows()
        counts = self._part.experts * _INTEGER
        for _ in range(1 + again):
            if experts.size > 1:
                yield LineName.OTHER, "all_to_all", experts.axes, counts
            if slices.size > 1:
                yield LineName.OTHER, "all_gather", slices.axes, slices.size * counts
        # There and back, forward and backward: the last product needs what came back, so all of it is done again.
        for _ in range(2 * (1 + comes_back + again)):
            if experts.size > 1:
                yield self._travel(experts, "all_to_all", max(rows, arrived) * self._row)
            if slices.size > 1:
                yield self._travel(slices, "all_to_all", slices.size * arrived * self._row)

    def _rows(self) -> tuple[int, int]:
        """Rows that a rank sends, and those that arrive at it: the first experts take what is left over."""
        part = self._part
        choices = math.ceil(self._tokens * part.top_k * part.routing.kept_share)
        each, left = divmod(choices, part.experts)
        counts = [each + (expert < left) for expert in range(part.experts)]
        holders = self._grid.experts.size
        return sum(counts), holders * sum(counts[: part.experts // holders])

    def _gathered(self, again: bool, comes_back: bool, follows: bool) -> Iterator[Sent]:
        """Every rank is given the tokens of all, and sums go back: not again where nothing follows them."""
        part, rows = self._part, self._tokens
        for group in (self._grid.experts, self._grid.slices):
            if group.size == 1:
                continue
            rows *= group.size
            for each in (rows * self._row, rows * self._weights):
                for _ in range(1 + again):
                    yield self._travel(group, "all_gather", each)
                if comes_back:
                    yield self._travel(group, self._scatter, each)
            for _ in range(1 + again):
                yield LineName.OTHER, "all_gather", group.axes, rows * part.top_k * _INTEGER
            for _ in range(1 + (again and follows)):
                yield self._travel(group, self._scatter, rows * self._row)
            if comes_back:
                yield self._travel(group, "all_gather", rows * self._row)

    def _travel(self, group: Group, operation: str, num_bytes: float) -> Sent:
        return LineName.EXPERTS, operation, group.axes, num_bytes
