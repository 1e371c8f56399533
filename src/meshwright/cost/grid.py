"""What a square or a cube of tensor ranks holds of one block, and every collective of its products, as we run them.

Of a product of (M, K) by (K, N) with q ranks a side and e bytes a number, M tokens of a microbatch:

- square (SUMMA, Optimus, 2104.05343): every pass of a product moves whole operands, in q pieces each. Forward
  broadcasts e M K / q along the rows and e K N / q along the columns; the gradient of the input broadcasts the latter
  and reduces the former, that of the weights broadcasts the former and reduces the latter. What several products read
  is broadcast once, so that a plain layer of b sequences of s tokens and h features moves forward the paper's
  (7 b s h + 12 h^2) / q numbers, and twice as many backward. A tree sends each log2(q) times.
- cube (2105.14450): forward gathers e M K / q^2 and e K N / q^2 and reduce-scatters e M N / q^2; backward gathers
  e M N / q^2 and reduce-scatters the other two. What several products read is gathered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.blocks import Attention, Block, Embedding, FeedForward, Head, Layer, Norm, NormKind, QueryKeyNorm
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import TensorGrid


class Operation(StrEnum):
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "all_gather"
    SCATTER = "reduce_scatter"
    TOTAL = "all_reduce"


_BACK = {
    Operation.GATHER: Operation.SCATTER,
    Operation.SCATTER: Operation.GATHER,
    Operation.TOTAL: Operation.TOTAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`calls` collectives of `each` bytes (the whole tensor) along a direction of the grid, of its 0 to 2.

    `ends`: nothing after it in its block keeps anything for backward.
    """

    operation: Operation
    direction: int
    each: float
    calls: float = 1.0
    ends: bool = False

    @property
    def back(self) -> Call:
        """What its gradient takes."""
        return Call(operation=_BACK[self.operation], direction=self.direction, each=self.each, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The collectives of one block and one microbatch."""

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]

    @property
    def again(self) -> tuple[Call, ...]:
        """Those of a forward that is repeated: it stops once backward has all it needs."""
        return tuple(call for call in self.forward if not call.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPortions:
    """Parameters of one block on one tensor rank before sharding: `matrices`, vectors, and how many numbers of the
    latter's gradients are `summed` over tensor ranks, each as often as there are directions that repeat it."""

    matrices: float
    vectors: float
    summed: float

    @property
    def local(self) -> float:
        return self.matrices + self.vectors


def grid_portions(block: Block, *, grid: TensorGrid, side: int) -> GridPortions:
    """The parameters of `block`; a tied head has none of its own but its norm and bias."""
    heads = sum(_head_norms(part) for part in block.parts) if isinstance(block, Layer) else 0
    vectors = _vectors(block)
    matrices = block.parameters - vectors - heads
    return GridPortions(
        matrices=matrices / side**grid.dims,
        vectors=vectors / side + heads,
        summed=vectors / side * (grid.dims - 1) + heads * grid.dims,
    )


def undivided(model: ModelSpec, *, grid: TensorGrid, side: int) -> Iterator[tuple[str, str]]:
    """Where and what a square or cube of so many ranks a side cannot share evenly.

    A cube divides a matrix along its rows twice: over the features, and what is gathered of it.
    """
    rows = side ** (grid.dims - 1)
    dimensions = [("embedding", "vocabulary", model.vocab, rows), ("embedding", "features", model.width, rows)]
    for index, layer in enumerate(model.layers):
        mixer, transform = layer.mixer, layer.transform
        if isinstance(mixer, Attention):
            where = f"layers[{index}].mixer"
            dimensions += [(where, "heads", mixer.heads, side), (where, "key-value heads", mixer.kv_heads, side)]
            dimensions.append((where, "features of keys", mixer.kv_heads * mixer.head_dim, rows))
        if isinstance(transform, FeedForward):
            dimensions.append((f"layers[{index}].transform", "hidden features", transform.hidden, rows))
    for where, what, number, parts in dimensions:
        if number % parts:
            yield where, f"a {grid.value} does not divide {what} of {number:,} in {parts}"


def grid_passes(block: Block, *, grid: TensorGrid, side: int, tokens: float, itemsize: float) -> Passes:
    """The collectives of `block` for a microbatch of `tokens` whose features have `itemsize` bytes a number."""
    made = _Calls(grid=grid, side=side, tokens=tokens, itemsize=itemsize)
    if isinstance(block, Embedding):
        made.look_up(block.vocab, block.width)
    elif isinstance(block, Head):
        made.norm(block.norm)
        made.enter(block.width)
        made.into(block.width, (block.vocab,), turned=block.tied)
        made.totals(made.inside, (1.0, 2.0), back=False)  # the largest logit of every token, then two sums
    else:
        for part in block.parts:
            made.part(part, ends=part is block.parts[-1])
    return Passes(forward=tuple(made.forward), backward=tuple(made.backward))


class _Calls:
    """Collectives as they are made, forward and backward."""

    def __init__(self, *, grid: TensorGrid, side: int, tokens: float, itemsize: float) -> None:
        self._square, self._side, self._tokens, self._itemsize = grid is TensorGrid.SQUARE, side, tokens, itemsize
        self._parts = side ** (grid.dims - 1)
        self.inside = 1 if self._square else 0
        self.forward: list[Call] = []
        self.backward: list[Call] = []

    def part(self, part: object, *, ends: bool) -> None:
        assert isinstance(part, (Attention, FeedForward)), f"{type(part).__name__} has no place on a grid"
        self.norm(part.norm)
        self.enter(part.width)
        if isinstance(part, Attention):
            query, key = part.heads * part.head_dim, part.kv_heads * part.head_dim
            self.into(part.width, (query, key) if part.shared_key_value else (query, key, key))
            if part.qk_norm is QueryKeyNorm.FULL:
                self.totals(self.inside, (1.0, 1.0))
            self.out_of(query, part.width, ends=ends and part.post_norm is None)
        else:
            self.into(part.width, (part.hidden,) * (2 if part.gated else 1))
            self.out_of(part.hidden, part.width, ends=ends and part.post_norm is None)
        self.norm(part.post_norm)

    def enter(self, width: int) -> None:
        """A cube gathers once what all products into a region read."""
        if not self._square:
            self._add(Operation.GATHER, 0, self._tokens * width / self._side**2)

    def into(self, width: int, outputs: Iterable[int], *, turned: bool = False) -> None:
        if self._square:
            self._summa(width, tuple(outputs), turned=turned)
            return
        for number in outputs:
            self._add(Operation.GATHER, 2, width * number / self._side**2)
            self._add(Operation.SCATTER, 1, self._tokens * number / self._side**2)

    def out_of(self, inputs: int, width: int, *, ends: bool) -> None:
        if self._square:
            self._summa(inputs, (width,), turned=False)
            return
        self._add(Operation.GATHER, 1, self._tokens * inputs / self._side**2)
        self._add(Operation.GATHER, 2, inputs * width / self._side**2)
        self._add(Operation.SCATTER, 0, self._tokens * width / self._side**2, ends=ends)

    def look_up(self, vocab: int, width: int) -> None:
        if self._square:
            self.forward += self._steps((Operation.BROADCAST, 0, vocab * width))
            self.backward += self._steps((Operation.REDUCE, 0, vocab * width))
            return
        self._add(Operation.GATHER, 2, vocab * width / self._side**2)
        self._add(Operation.SCATTER, 0, self._tokens * width / self._side**2)

    def norm(self, norm: Norm | None) -> None:
        if norm is not None:
            self.totals(1, (1.0, 1.0) if norm.kind is NormKind.LAYER else (1.0,))

    def totals(self, direction: int, numbers: Iterable[float], *, back: bool = True) -> None:
        """So many numbers of every token are summed, in fp32 at the least."""
        for number in numbers:
            each = number * self._tokens / self._parts * max(self._itemsize, 4.0)
            call = Call(operation=Operation.TOTAL, direction=direction, each=each)
            self.forward.append(call)
            self.backward += [call.back] if back else []

    def _summa(self, inputs: int, outputs: tuple[int, ...], *, turned: bool) -> None:
        """The products of one input with so many matrices; a `turned` one is of a table that lies as the embedding
        needs it."""
        moved = self._tokens * (outputs[0] if turned else inputs)
        matrices = [float(inputs * number) for number in outputs]
        down = [(Operation.BROADCAST, 0, numbers) for numbers in matrices]
        self.forward += self._steps((Operation.REDUCE if turned else Operation.BROADCAST, 1, moved), *down)
        self.backward += self._steps((Operation.BROADCAST if turned else Operation.REDUCE, 1, moved), *down)
        summed = [(Operation.REDUCE, 0, numbers) for numbers in matrices]
        self.backward += self._steps((Operation.BROADCAST, 1, moved), *summed)

    def _steps(self, *moved: tuple[Operation, int, float]) -> list[Call]:
        """One collective of a block for each step along the side."""
        size = self._itemsize / self._side**2
        return [
            Call(operation=operation, direction=direction, each=numbers * size, calls=float(self._side))
            for operation, direction, numbers in moved
        ]

    def _add(self, operation: Operation, direction: int, numbers: float, *, ends: bool = False) -> None:
        call = Call(operation=operation, direction=direction, each=numbers * self._itemsize, ends=ends)
        self.forward.append(call)
        self.backward.append(call.back)


def _head_norms(part: object) -> int:
    """Parameters of norms over each head, which every rank has whole."""
    return 2 * part.head_dim if isinstance(part, Attention) and part.qk_norm is QueryKeyNorm.HEAD else 0


def _vectors(block: Block) -> int:
    """Parameters along features, which one direction divides: norms, biases, sinks and learned positions."""
    if isinstance(block, Embedding):
        return block.positions * block.width
    if isinstance(block, Head):
        return (block.norm.parameters if block.norm else 0) + (block.vocab if block.bias else 0)
    assert isinstance(block, Layer)
    return sum(part.parameters - _matrices(part) - _head_norms(part) for part in block.parts)


def _matrices(part: object) -> int:
    assert isinstance(part, (Attention, FeedForward)), f"{type(part).__name__} has no place on a grid"
    return part.matrix_parameters
