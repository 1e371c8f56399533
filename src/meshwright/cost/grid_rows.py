"""Squares and cubes of tensor ranks in a table of plans, row by row: such rows are few, and come from edited plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshwright.cost.grid import Call, Operation, Passes, grid_passes, grid_portions
from meshwright.cost.overlap import Traffic
from meshwright.cost.shared_features import Features, Shared, TensorLinks
from meshwright.cost.table import TENSOR_GRIDS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.blocks import Block

_DIMS = np.array([float(grid.dims) for grid in TENSOR_GRIDS])


def grid_dims(table: PlanTable) -> FloatArray:
    """Directions in which the tensor ranks of every row lie."""
    return np.asarray(_DIMS[table.tensor_grid])


def held_on_grids(block: Block, table: PlanTable, parameters: FloatArray) -> FloatArray:
    """`parameters` of `block` on one tensor rank before sharding, exact where ranks lie on a square or cube."""
    rows = _rows(table)
    if not len(rows):
        return parameters
    found = parameters.copy()
    for row in rows:
        grid = TENSOR_GRIDS[int(table.tensor_grid[row])]
        found[row] = grid_portions(block, grid=grid, side=int(table.side[row])).local
    return found


def on_grids(
    shared: Shared,
    block: Block,
    table: PlanTable,
    *,
    links: tuple[TensorLinks, ...],
    tokens: FloatArray,
    size: FloatArray,
) -> Shared:
    """`shared` features, and on squares and cubes the collectives of every product of `block` instead, all waited for.

    `tokens` of a microbatch whose heads a rank works on and bytes of a number, one entry a row; `links` along every
    direction.
    """
    rows = _rows(table)
    if not len(rows):
        return shared
    passes = [_passes(block, table, row, tokens=float(tokens[row]), size=float(size[row])) for row in rows]
    told = {
        "forward": [each.forward for each in passes],
        "again": [each.again for each in passes],
        "backward": [each.backward for each in passes],
    }
    lines = table.tensor_grid == 0
    moved = np.where(lines, shared.moved, 0.0)
    for row, each in zip(rows, passes, strict=True):
        moved[row] = sum(call.each * call.calls for call in (*each.forward, *each.backward))
    made = {
        name: _features(getattr(shared, name), lines, _waits(table, rows, calls, links=links))
        for name, calls in told.items()
    }
    return replace(shared, **made, moved=moved)


def _rows(table: PlanTable) -> npt.NDArray[np.intp]:
    return np.flatnonzero((table.tensor_grid > 0) & (table.tensor > 1))


def _passes(block: Block, table: PlanTable, row: int, *, tokens: float, size: float) -> Passes:
    grid, side = TENSOR_GRIDS[int(table.tensor_grid[row])], int(table.side[row])
    whole = tokens * grid.token_parts(int(table.tensor[row]))
    return grid_passes(block, grid=grid, side=side, tokens=whole, itemsize=size)


def _features(features: Features, lines: npt.NDArray[np.bool_], waits: Traffic) -> Features:
    return Features(
        waits=features.waits.where(lines) + waits,
        beside=features.beside.where(lines),
        held_up=np.where(lines, features.held_up, 0.0),
    )


def _waits(
    table: PlanTable, rows: npt.NDArray[np.intp], calls: list[tuple[Call, ...]], *, links: tuple[TensorLinks, ...]
) -> Traffic:
    total = Traffic.none(np.zeros(len(table)))
    for direction, link in enumerate(links):
        seconds, moved = np.zeros(len(table)), np.zeros(len(table))
        for row, made in zip(rows, calls, strict=True):
            for call in made:
                if call.direction == direction:
                    seconds[row] += _seconds(call, link, row=row, side=float(table.side[row]))
                    moved[row] += call.each * call.calls
        total = total + Traffic.over(seconds, link.way, num_bytes=moved)
    return total


def _seconds(call: Call, link: TensorLinks, *, row: int, side: float) -> float:
    """Of all calls. A broadcast or reduction sends its bytes log2(side) times, as a tree does (2104.05343)."""
    one = np.array([row])
    if call.operation is Operation.TOTAL:
        return call.calls * float(link.reduce.take(one).seconds(call.each)[0])
    if call.operation is Operation.SCATTER:
        return call.calls * float(link.scatter.take(one).seconds(call.each)[0])
    whole = call.each if call.operation is Operation.GATHER else call.each * np.log2(side) * side / (side - 1.0)
    return call.calls * float(link.gather.take(one).seconds(whole)[0])
