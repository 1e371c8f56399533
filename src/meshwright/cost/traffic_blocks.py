"""What one pass of one microbatch sends inside a block: entering and leaving regions, keys, values and heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost.grid import Operation, grid_passes
from meshwright.cost.scales import COMPARES, OPERANDS, expert_products, linears
from meshwright.cost.traffic_experts import Dispatching, countings
from meshwright.cost.traffic_groups import GridGroups, along
from meshwright.spec.blocks import Attention, Block, Embedding, Layer, Mixture, QueryKeyNorm
from meshwright.spec.exchange import ExchangeKind
from meshwright.spec.model import LatentAttention
from meshwright.spec.plan import AxisName, Design, Recompute, TensorGrid
from meshwright.spec.report import LineName

Sent = tuple[LineName, str, tuple[AxisName, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes an element has in products and in sums, and what a reduce-scatter is done as."""

    compute: float
    scatter: str

    @property
    def wide(self) -> float:
        return max(self.compute, 4.0)


class BlockTraffic:
    """The collectives of a forward and a backward of one pass, computed again as the plan says."""

    def __init__(self, design: Design, widths: Widths, *, grid: GridGroups | None) -> None:
        plan = design.plan
        self._plan, self._widths, self._grid = plan, widths, grid
        self._tensor = along(plan, AxisName.TENSOR)
        self._split = plan.first_group.sequence_parallel and plan.tensor > 1
        # Tokens that a region sees, and those of the residual stream between regions.
        self._tokens = plan.microbatch * plan.sequence_length // (plan.context * plan.schedule.slices)
        self._hidden = self._tokens * design.model.width * widths.compute
        self._own = self._tokens // (plan.tensor if self._split else 1)

    def of(self, block: Block, recompute: Recompute, *, comes_back: bool, trained: bool = True) -> Iterator[Sent]:
        """Line, operation, axes and bytes of each collective; those of forward alone unless backward `comes_back`."""
        if self._plan.tensor_grid is not TensorGrid.LINE and self._tensor.size > 1:
            yield from self._on_square_or_cube(block, recompute)
        elif isinstance(block, Layer):
            again = recompute if comes_back else Recompute.NONE
            yield from self._layer(block, again, comes_back)
            yield from self._scales(block, 1 + (again is Recompute.FULL) + comes_back * (1 + trained))
        elif self._tensor.size == 1:
            return
        elif isinstance(block, Embedding):
            yield self._leave()
            if comes_back:
                yield from self._leave_back()
        else:
            yield from self._enter()
            yield self._leave()  # entering's backward
            for numbers in (1.0, 2.0):  # the largest logit of every token, then two sums
                yield self._sum(numbers * self._tokens * self._widths.wide)

    def _on_square_or_cube(self, block: Block, recompute: Recompute) -> Iterator[Sent]:
        """The operands of every product."""
        grid = self._plan.tensor_grid
        side, itemsize = grid.side(self._plan.tensor), self._widths.compute
        passes = grid_passes(block, grid=grid, side=side, tokens=float(self._tokens), itemsize=itemsize)
        again = passes.again if isinstance(block, Layer) and recompute is Recompute.FULL else ()
        for call in (*passes.forward, *again, *passes.backward):
            operation = self._widths.scatter if call.operation is Operation.SCATTER else call.operation.value
            yield LineName.TENSOR, operation, self._tensor.axes, call.each * call.calls

    def _layer(self, layer: Layer, recompute: Recompute, comes_back: bool) -> Iterator[Sent]:
        again = recompute is Recompute.FULL
        mixer = layer.mixer
        if mixer is not None:
            after = layer.transform is not None or mixer.post_norm is not None
            yield from self._region(again, ends=not after, comes_back=comes_back)
            if isinstance(mixer, Attention) and mixer.qk_norm is QueryKeyNorm.FULL and self._tensor.size > 1:
                for _ in range(2 * (1 + comes_back + again)):
                    yield self._sum(self._tokens * self._widths.wide)
            if isinstance(mixer, (Attention, LatentAttention)) and self._plan.context > 1:
                yield from self._context(mixer, recompute, comes_back)
        part = layer.transform
        if layer.dense is not None:
            yield from self._region(again, ends=False, comes_back=comes_back)
        if part is None:
            return
        closes = part.post_norm is None and layer.sum_norm is None and not layer.scaled
        if isinstance(part, Mixture):
            yield from countings(part, self._plan, on_grid=self._grid is not None, again=again)
        if not isinstance(part, Mixture) or self._grid is None:
            yield from self._region(again, ends=closes, comes_back=comes_back)
            return
        dispatching = Dispatching(
            part, self._grid, self._plan, tokens=self._own, itemsize=self._widths.compute, scatter=self._widths.scatter
        )
        follows = part.shared is not None or not closes
        yield from dispatching.sent(again=again, comes_back=comes_back, follows=follows)
        if part.shared is not None:
            yield from self._region(again, ends=closes and not part.shared_gate, comes_back=comes_back)

    def _scales(self, layer: Layer, passes: int) -> Iterator[Sent]:
        """Before each of so many products with a matrix, the ranks that divide it compare what they multiply."""
        plan, part, each = self._plan, layer.transform, OPERANDS * self._widths.wide
        if not COMPARES[plan.first_group.precision]:
            return
        if self._tensor.size > 1:
            for _ in range(passes * linears(layer)):
                yield self._sum(each)
        slices = self._tensor if self._grid is None else self._grid.slices
        if not isinstance(part, Mixture) or slices.size == 1:
            return
        holders, tokens = (1, self._tokens) if self._grid is None else (self._grid.experts.size, self._own)
        line = LineName.TENSOR if self._grid is None else LineName.EXPERTS
        choices = math.ceil(tokens * part.top_k * part.routing.kept_share) * (1 if self._grid is None else slices.size)
        for _ in range(passes * expert_products(part, holders=holders, choices=choices)):
            yield line, "all_reduce", slices.axes, each

    def _region(self, again: bool, *, ends: bool, comes_back: bool) -> Iterator[Sent]:
        """Entered and left, and backward leaves and enters it; what is computed again ends once backward has all it
        needs: before a region is left that nothing follows."""
        if self._tensor.size == 1:
            return
        for _ in range(1 + again):
            yield from self._enter()
        for _ in range(1 + (again and not ends)):
            yield self._leave()
        if comes_back:
            yield self._leave()
            yield from self._leave_back()

    def _enter(self) -> Iterator[Sent]:
        if self._split:
            yield LineName.TENSOR, "all_gather", self._tensor.axes, self._hidden

    def _leave(self) -> Sent:
        operation = self._widths.scatter if self._split else "all_reduce"
        return LineName.TENSOR, operation, self._tensor.axes, self._hidden

    def _leave_back(self) -> Iterator[Sent]:
        yield from self._enter()

    def _sum(self, num_bytes: float) -> Sent:
        return LineName.TENSOR, "all_reduce", self._tensor.axes, num_bytes

    def _context(self, mixer: Attention | LatentAttention, recompute: Recompute, comes_back: bool) -> Iterator[Sent]:
        """Heads are traded among neighbours and back, keys and values go to the other runs of them."""
        plan, traders = self._plan, self._plan.exchange.inner
        again = recompute is not Recompute.NONE
        heads, keys = _heads(mixer, tensor=plan.tensor)
        query, key, value = _features(mixer)
        axes = (AxisName.CONTEXT,)
        # Each trader is given some heads of keys: of too few there are copies.
        keys *= traders // math.gcd(keys, traders)
        if traders > 1:
            there = self._tokens * (heads * query + keys * (key + value)) * self._widths.compute
            back = self._tokens * heads * value * self._widths.compute
            for _ in range(1 + comes_back + again):
                yield LineName.CONTEXT, "all_to_all", axes, there
            for _ in range(1 + comes_back + (recompute is Recompute.FULL)):
                yield LineName.CONTEXT, "all_to_all", axes, back
        runs = plan.context // traders
        if runs == 1:
            return
        # As many as before the trade: more tokens of fewer heads. A slice brings the keys of those before it too.
        elements = self._tokens * keys * (key + value) * (plan.schedule.slices + 1) / 2
        block, wide = elements * self._widths.compute, elements * self._widths.wide
        passings, sums = 1 + comes_back + again, wide * comes_back
        if plan.exchange.kind is ExchangeKind.RING:
            for operation in ("send", "recv"):
                yield LineName.CONTEXT, operation, axes, (runs - 1) * (passings * block + sums)
            return
        yield LineName.CONTEXT, "all_gather", axes, passings * runs * block
        yield LineName.CONTEXT, self._widths.scatter, axes, runs * sums


def _heads(mixer: Attention | LatentAttention, *, tensor: int) -> tuple[int, int]:
    """Heads of queries and of keys on one tensor rank."""
    keys = mixer.kv_heads if isinstance(mixer, Attention) else mixer.heads
    return mixer.heads // tensor, max(keys // tensor, 1)


def _features(mixer: Attention | LatentAttention) -> tuple[int, int, int]:
    """Of a head of queries, of keys and of values."""
    if isinstance(mixer, Attention):
        return mixer.head_dim, mixer.head_dim, mixer.head_dim
    scored = mixer.nope_dim + mixer.rope_dim
    return scored, scored, mixer.value_dim
