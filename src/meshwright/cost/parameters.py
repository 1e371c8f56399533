"""Parameters of every rank: whole on it before sharding, and what it owns after it, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.block_bytes import BlockBytes, Holds
from meshwright.cost.layouts import Backward, Kind, LayoutArrays
from meshwright.cost.states import experts_apart
from meshwright.cost.table import PlanTable
from meshwright.cost.vocabulary import table_elements
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Block, ModelSpec


def trained_of(blocks: Sequence[Holds], *, kinds: Sequence[Kind]) -> list[Holds]:
    """The blocks as though those that are not trained had no parameters."""
    return [
        block if kind.backward is Backward.WHOLE else untrained(block)
        for kind, block in zip(kinds, blocks, strict=True)
    ]


def gathered_of(blocks: Sequence[Holds], *, kinds: Sequence[Kind], table: PlanTable) -> list[Holds]:
    """The blocks as though they had no experts that are gathered from nobody."""
    return [_without_apart(block, kind.rows(table)) for kind, block in zip(kinds, blocks, strict=True)]


def _without_apart(block: Holds, rows: PlanTable) -> Holds:
    experts = np.where(experts_apart(rows), block.expert_parameters, 0.0)
    parameters = block.parameters - experts
    return _Less(bytes=block.bytes, parameters=parameters, expert_parameters=block.expert_parameters - experts)


def untrained(block: Holds) -> Holds:
    return _of(block, 0.0)


def _of(block: Holds, share: FloatArray | float) -> Holds:
    """The block as though it had only `share` of its parameters, by row."""
    parameters, experts = block.parameters * share, block.expert_parameters * share
    return _Less(bytes=block.bytes, parameters=parameters, expert_parameters=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Less:
    bytes: BlockBytes
    parameters: FloatArray
    expert_parameters: FloatArray


def local_parameters(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """Parameters of every rank after tensor division and before sharding, shape (rows, ranks).

    A tied head away from its embedding holds a copy of the matrix; towers live with the embedding.
    """
    total = counts["total"]
    values = np.stack([block.parameters for block in blocks], axis=1)
    parameters = np.einsum("nrk,nk->nr", total[..., :-1], values)
    copied = _copied_tables(table, blocks, arrays=arrays, counts=counts, model=model)
    parameters = parameters if copied is None else parameters + copied
    embeds = arrays.of(model.embedding, total)
    return np.asarray(parameters + embeds * float(sum(tower.parameters for tower in model.towers)))


def _copied_tables(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray | None:
    """Parameters of tied heads' copies of the matrix, in other stages than their embedding; None where it has none."""
    of_table = next(b for k, b in zip(arrays.kinds, blocks, strict=True) if k.block == model.embedding)
    if not (model.head.tied and of_table.parameters.any()):
        return None
    embeds, heads = (arrays.of(block, counts["last"]) for block in (model.embedding, model.head))
    return np.maximum(heads - embeds, 0.0) * table_elements(model.head, table)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Parameters of every rank that are sharded in one of some ways, shape (rows, ranks): `whole` before it, and those
    `owned` after it."""

    whole: FloatArray
    owned: FloatArray


def sharded_as(
    ways: Sequence[int],
    *,
    all_: Shared,
    table: PlanTable,
    blocks: Sequence[Holds],
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> Shared:
    """Of parameters of every rank, `all_` of which are of `blocks`, those of blocks that are sharded in one of these
    `ways`, indexes into SHARDINGS."""
    if all(kind.sharding is None for kind in arrays.kinds):
        those = np.isin(table.sharding, ways)[:, None]
        return Shared(whole=np.where(those, all_.whole, 0.0), owned=np.where(those, all_.owned, 0.0))
    chosen = [np.isin(kind.rows(table).sharding, ways).astype(np.float64) for kind in arrays.kinds]
    return shared_of(table, blocks, chosen, arrays=arrays, counts=counts, model=model)


def shared_of(
    table: PlanTable,
    blocks: Sequence[Holds],
    chosen: Sequence[FloatArray],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> Shared:
    """Parameters of every rank that are of `blocks` of the kinds `chosen`, 1 or 0 by row."""
    held = [_of(block, share) for block, share in zip(blocks, chosen, strict=True)]
    whole = np.einsum("nrk,nk->nr", counts["total"][..., :-1], np.stack([each.parameters for each in held], axis=1))
    copied = _copied_tables(table, blocks, arrays=arrays, counts=counts, model=model)
    if copied is not None:
        whole = whole + copied * _of_first(model.head, chosen, arrays=arrays, counts=counts)
    if all(kind.shards is None for kind in arrays.kinds):
        return Shared(whole=whole, owned=owned_parameters(table, whole, grid_parameters(table, held, counts=counts)))
    return Shared(whole=whole, owned=_owned_by_kind(table, held, chosen, arrays=arrays, counts=counts, model=model))


def owned_of(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """What every rank owns after sharding of the parameters of `blocks`, each as it is sharded; shape (rows, ranks)."""
    if all(kind.shards is None for kind in arrays.kinds):
        whole = local_parameters(table, blocks, arrays=arrays, counts=counts, model=model)
        return owned_parameters(table, whole, grid_parameters(table, blocks, counts=counts))
    every = [np.ones(len(table))] * len(blocks)
    return _owned_by_kind(table, blocks, every, arrays=arrays, counts=counts, model=model)


def _owned_by_kind(
    table: PlanTable,
    blocks: Sequence[Holds],
    chosen: Sequence[FloatArray],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """As `owned_of`; copies of a tied table, and towers, as far as the blocks are `chosen` that hold them (0 or 1)."""
    tables = [kind.rows(table) for kind in arrays.kinds]
    apart = [np.where(table.on_grid, block.expert_parameters, 0.0) for block in blocks]
    each = [
        owned_parameters(rows, block.parameters[:, None], grid[:, None])[:, 0]
        for rows, block, grid in zip(tables, blocks, apart, strict=True)
    ]
    found = np.einsum("nrk,nk->nr", counts["total"][..., :-1], np.stack(each, axis=1))
    ones = np.ones((len(table), 1))
    owned = [owned_parameters(rows, ones, 0.0 * ones)[:, 0] for rows in tables]
    shares = [each * share for each, share in zip(owned, chosen, strict=True)]
    copied = _copied_tables(table, blocks, arrays=arrays, counts=counts, model=model)
    if copied is not None:
        found = found + copied * _of_first(model.head, shares, arrays=arrays, counts=counts)
    towers = float(sum(tower.parameters for tower in model.towers))
    more = towers * _of_first(model.embedding, shares, arrays=arrays, counts=counts) if towers else 0.0
    return np.asarray(found + more)


def _of_first(
    block: Block, values: Sequence[FloatArray], *, arrays: LayoutArrays, counts: Mapping[str, FloatArray]
) -> FloatArray:
    """Of `values` of every kind, shape (rows,), that of `block` where a rank has it, else 0; shape (rows, ranks)."""
    alike = [index for index, kind in enumerate(arrays.kinds) if kind.block == block]
    here = [np.where(counts["total"][..., index] > 0, values[index][:, None], 0.0) for index in alike]
    return np.asarray(np.sum(here, axis=0), dtype=np.float64)


def grid_parameters(table: PlanTable, blocks: Sequence[Holds], *, counts: Mapping[str, FloatArray]) -> FloatArray:
    """Of `local_parameters`, those that lie on a grid of experts, shape (rows, ranks)."""
    if not table.on_grid.any():
        return np.zeros(counts["total"].shape[:2])
    values = np.stack([np.where(table.on_grid, block.expert_parameters, 0.0) for block in blocks], axis=1)
    return np.asarray(np.einsum("nrk,nk->nr", counts["total"][..., :-1], values))


def owned_parameters(table: PlanTable, parameters: FloatArray, apart: FloatArray) -> FloatArray:
    """Parameters of every rank after sharding: `apart` are over other ranks than the rest, shape (rows, ranks)."""
    sharded = table.sharding > 0
    dense = np.where(sharded, table.divided, 1)[:, None]
    experts = np.where(sharded, table.expert_divided, 1)[:, None]
    return np.asarray((parameters - apart) / dense + apart / experts)


def sent_parameters(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """What every rank owns of trained parameters, which it sends where it is a learner's; shape (rows, ranks)."""
    changed = trained_of(blocks, kinds=arrays.kinds)
    return owned_of(table, changed, arrays=arrays, counts=counts, model=model)
