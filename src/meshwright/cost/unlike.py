"""Stages whose blocks are sharded in unlike ways: what passes free and what is summed whole, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.layouts import Kind
from meshwright.cost.offload import keeps_parameters_away
from meshwright.cost.parameters import owned_parameters
from meshwright.cost.states import ZERO1, ZERO3, experts_apart, replicas_meeting
from meshwright.cost.synchronize import turns
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Embedding, Head, Layer

_WAYS = ("frees", "sums", "ranks", "share")
_OF_LAYERS = (
    *("largest_kept", "largest_waits", "working", "half", "ending", "mixing"),
    *("largest", "largest_made", "closing", "formed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Of a block that is sharded, by row, 1 or 0: whether passes free its parameters (`frees`), whether it is one of
    those that zero3 does not free (`stays`), and whether its gradients are summed whole (`sums`). So many `ranks`
    divide it, each of which has the gradient of a `share` of it: none where that goes to the host's memory at once."""

    frees: FloatArray
    stays: FloatArray
    sums: FloatArray
    ranks: FloatArray
    share: FloatArray


def shards(kinds: Sequence[Kind], blocks: Sequence[Holds], table: PlanTable) -> list[Shards]:
    """Of a block of every kind, shape (rows,)."""
    shared = turns(table) > 1.0
    return [_shards(kind.rows(table), block, shared) for kind, block in zip(kinds, blocks, strict=True)]


def _shards(table: PlanTable, block: Holds, shared: BoolArray) -> Shards:
    sharding, sharded = table.sharding, table.sharding > 0
    apart = np.where(table.on_grid & ~experts_apart(table), block.expert_parameters, 0.0)
    whole = np.maximum(block.parameters - np.where(experts_apart(table), block.expert_parameters, 0.0), 1.0)
    stays = ~keeps_parameters_away(table) | (replicas_meeting(table) > 1)
    return Shards(
        frees=1.0 * ((sharding == ZERO3) & ~shared),
        stays=1.0 * (sharded & (sharding != ZERO3)),
        sums=1.0 * ((sharding == ZERO1) | (sharded & shared)),
        ranks=1.0 * np.where(sharded, table.divided, 1),
        share=np.where(stays, owned_parameters(table, whole[:, None], apart[:, None])[:, 0] / whole, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Layers of one kind, one after another on a stage: `number` of them, shape (rows, ranks). What one of them holds,
    as in StageHeld, and how it is sharded, as in Shards."""

    number: FloatArray
    largest_kept: FloatArray
    largest_waits: FloatArray
    working: FloatArray
    half: FloatArray
    ending: FloatArray
    mixing: FloatArray
    largest: FloatArray
    largest_made: FloatArray
    closing: FloatArray
    formed: FloatArray
    frees: FloatArray
    sums: FloatArray
    ranks: FloatArray
    share: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the head or the table of a stage is sharded, as in Shards; zeros where it has none."""

    frees: FloatArray
    sums: FloatArray
    ranks: FloatArray
    share: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """Layers in the order of backward, and how both ends are sharded."""

    runs: tuple[LayerRun, ...]
    head: End
    table: End


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
    for name in _WAYS:
        told[name] = sorted_([getattr(ways[index], name) for index in layers])
    told["number"] = np.take_along_axis(numbers, order, axis=2)
    runs = tuple(
        LayerRun(**{field.name: told[field.name][..., place] for field in fields(LayerRun)})
        for place in range(len(layers))
    )

    def of_end(block: type) -> End:
        ends = [index for index, kind in enumerate(kinds) if isinstance(kind.block, block)]
        found = {
            name: [(counts[..., index] > 0) * getattr(ways[index], name)[chosen][:, None] for index in ends]
            for name in _WAYS
        }
        return End(**{name: np.asarray(np.sum(values, axis=0), dtype=np.float64) for name, values in found.items()})

    return Unlike(runs=runs, head=of_end(Head), table=of_end(Embedding))
