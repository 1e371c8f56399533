"""Stages whose blocks are sharded in unlike ways: what passes free and what is summed whole, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.layouts import Kind
from meshwright.cost.states import ZERO1, ZERO3
from meshwright.cost.synchronize import turns
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Embedding, Head, Layer

_OF_LAYERS = ("largest_kept", "working", "ending", "mixing", "largest", "largest_made", "closing", "formed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Of a block that is sharded, by row, 1 or 0: whether passes free its parameters (`frees`), whether it is one of
    those that zero3 does not free (`stays`), and whether its gradients are summed whole (`sums`)."""

    frees: FloatArray
    stays: FloatArray
    sums: FloatArray


def shards(kinds: Sequence[Kind], table: PlanTable) -> list[Shards]:
    """Of a block of every kind, shape (rows,)."""
    shared = turns(table) > 1.0
    known = {way: _shards(kind.rows(table).sharding, shared) for way, kind in {k.sharding: k for k in kinds}.items()}
    return [known[kind.sharding] for kind in kinds]


def _shards(sharding: IntArray, shared: BoolArray) -> Shards:
    sharded = sharding > 0
    return Shards(
        frees=1.0 * ((sharding == ZERO3) & ~shared),
        stays=1.0 * (sharded & (sharding != ZERO3)),
        sums=1.0 * ((sharding == ZERO1) | (sharded & shared)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Layers of one kind, one after another on a stage: `number` of them, shape (rows, ranks). What one of them holds,
    as in StageHeld, and whether its parameters are freed and its gradients summed whole (0 or 1)."""

    number: FloatArray
    largest_kept: FloatArray
    working: FloatArray
    ending: FloatArray
    mixing: FloatArray
    largest: FloatArray
    largest_made: FloatArray
    closing: FloatArray
    formed: FloatArray
    frees: FloatArray
    sums: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """Layers in the order of backward; whether those of head and table are freed and summed whole (0 or 1)."""

    runs: tuple[LayerRun, ...]
    head_frees: FloatArray
    head_sums: FloatArray
    table_frees: FloatArray
    table_sums: FloatArray


def of_blocks(
    counts: FloatArray,
    *,
    kinds: Sequence[Kind],
    places: FloatArray,
    each: Sequence[Mapping[str, FloatArray]],
    ways: Sequence[Shards],
    rows: IntArray | None,
) -> Unlike:
    """Of the blocks that are counted, (rows, ranks, kinds + 1), in the rows chosen, where some are. Layers of a kind
    are taken to lie side by side, where those of its rank are on the mean: `places`, shape (rows, ranks, kinds + 1).

    `each` and `ways` are of every kind what a block of it holds, and how it is sharded, in all rows.
    """
    chosen = slice(None) if rows is None else rows
    layers = [index for index, kind in enumerate(kinds) if isinstance(kind.block, Layer)]
    numbers, order = counts[..., layers], np.argsort(-places[..., layers], axis=2, kind="stable")

    def sorted_(values: Sequence[FloatArray]) -> FloatArray:
        stacked = np.stack([np.broadcast_to(np.asarray(entry)[chosen], len(counts)) for entry in values], axis=-1)
        spread = np.broadcast_to(stacked[:, None, :], numbers.shape)
        return np.take_along_axis(spread, order, axis=2)

    told = {name: sorted_([each[index][name] for index in layers]) for name in _OF_LAYERS}
    for name in ("frees", "sums"):
        told[name] = sorted_([getattr(ways[index], name) for index in layers])
    told["number"] = np.take_along_axis(numbers, order, axis=2)
    runs = tuple(
        LayerRun(**{field.name: told[field.name][..., place] for field in fields(LayerRun)})
        for place in range(len(layers))
    )

    def of_end(block: type, name: str) -> FloatArray:
        ends = [index for index, kind in enumerate(kinds) if isinstance(kind.block, block)]
        found = [(counts[..., index] > 0) * getattr(ways[index], name)[chosen][:, None] for index in ends]
        return np.asarray(np.sum(found, axis=0), dtype=np.float64)

    return Unlike(
        runs=runs,
        head_frees=of_end(Head, "frees"),
        head_sums=of_end(Head, "sums"),
        table_frees=of_end(Embedding, "frees"),
        table_sums=of_end(Embedding, "sums"),
    )
