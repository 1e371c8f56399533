"""Bytes on squares and cubes of tensor ranks are those of the papers' formulas."""

from __future__ import annotations

import pytest

from meshwright.cost.grid import Call, Operation, grid_passes, grid_portions
from meshwright.spec.blocks import Attention, Embedding, FeedForward, Layer, Norm
from meshwright.spec.plan import TensorGrid

WIDTH, TOKENS, ITEM = 64, 96.0, 2.0
NORM = Norm(width=WIDTH)
# The layer of the papers: as many keys as queries, and four times as many hidden features.
PLAIN = Layer(
    mixer=Attention(width=WIDTH, heads=8, kv_heads=8, head_dim=8, norm=NORM),
    transform=FeedForward(width=WIDTH, hidden=4 * WIDTH, norm=NORM, gated=False),
)


def moved(calls: tuple[Call, ...]) -> float:
    """Bytes of whole operands, without the numbers of norms."""
    return sum(call.each * call.calls for call in calls if call.operation is not Operation.TOTAL)


@pytest.mark.parametrize("side", [2, 4])
def test_a_square_moves_what_optimus_says(side: int) -> None:
    """2104.05343, table 1: (7 b s h + 12 h^2) log(p) / (2 sqrt(p)) forward and three times that with what is computed
    again backward; the logarithm is the tree's."""
    found = grid_passes(PLAIN, grid=TensorGrid.SQUARE, side=side, tokens=TOKENS, itemsize=ITEM)
    formula = ITEM * (7 * TOKENS * WIDTH + 12 * WIDTH**2) / side
    assert moved(found.forward) == pytest.approx(formula)
    assert moved((*found.again, *found.backward)) == pytest.approx(3 * formula)


@pytest.mark.parametrize("side", [2, 4])
def test_a_cube_gathers_and_scatters_every_operand_once_a_pass(side: int) -> None:
    """2105.14450: the two operands and the product, each over q^2 of the q^3 ranks; inputs of several products once."""
    found = grid_passes(PLAIN, grid=TensorGrid.CUBE, side=side, tokens=TOKENS, itemsize=ITEM)
    products = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    formula = sum(TOKENS * k + k * n + TOKENS * n for k, n in products) * ITEM / side**2
    assert moved(found.forward) == pytest.approx(formula)
    assert moved(found.backward) == pytest.approx(formula)
    gathered = sum(call.each for call in found.forward if call.operation is Operation.GATHER)
    scattered = sum(call.each for call in found.backward if call.operation is Operation.SCATTER)
    assert gathered == pytest.approx(scattered)


@pytest.mark.parametrize("grid", [TensorGrid.SQUARE, TensorGrid.CUBE])
def test_matrices_are_divided_over_every_rank_and_vectors_along_a_side(grid: TensorGrid) -> None:
    table, layer = (grid_portions(block, grid=grid, side=2) for block in (Embedding(vocab=512, width=WIDTH), PLAIN))
    assert table.local == 512 * WIDTH / 2**grid.dims
    assert layer.matrices == 12 * WIDTH**2 / 2**grid.dims
    assert layer.vectors == 2 * WIDTH / 2
    assert layer.summed == 2 * WIDTH / 2 * (grid.dims - 1)
