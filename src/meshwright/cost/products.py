"""Seconds of matrix products on one device: cut into tiles where its kernels are known, else a smooth curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import MatrixTiles

_MULTIPLES = (8.0, 4.0, 2.0)  # bytes: whole rows of 16 are loaded by the widest instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRates:
    """What products depend on beside their shapes; arrays of shape (rows,).

    `achieved` FLOP/s of large products, `half_m`, `half_n` and `half_k` the sizes that reach half of it where there
    are no `tiles`; `bandwidth` bytes/s; `operand` and `result` bytes of an element read and written.
    """

    achieved: FloatArray
    half_m: FloatArray
    half_n: FloatArray
    half_k: FloatArray
    bandwidth: float
    operand: FloatArray
    result: FloatArray
    tiles: MatrixTiles | None = None


def product_seconds(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    rates: ProductRates,
    *,
    together: FloatArray | float = 1.0,
    least: FloatArray | float = 0.0,
    rows: Sequence[FloatArray] = (),
) -> FloatArray:
    """Seconds of each (m, k) x (k, n) of `together` that share the units, whose factors lie in `rows` of so many
    elements.

    Not under the time to read and write its elements once, nor under `least`.
    """
    moved = rates.operand * (m * k + k * n) + rates.result * m * n
    if rates.tiles is None:
        work = _smooth(m, n, k, rates)
    else:
        work = _tiled(m, n, k, rates, rates.tiles, together) / _aligned(rows, rates, rates.tiles)
    return np.maximum(np.maximum(work, least), moved / rates.bandwidth)


def _aligned(rows: Sequence[FloatArray], rates: ProductRates, tiles: MatrixTiles) -> FloatArray | float:
    """The share of their rate that kernels reach which load such rows: the least of them."""
    if tiles.misaligned == (1.0, 1.0, 1.0):
        return 1.0
    share: FloatArray | float = 1.0
    for length in rows:
        size = np.ceil(length) * rates.operand
        reached = np.ones_like(size)
        for multiple, entry in zip(_MULTIPLES, tiles.misaligned, strict=True):
            reached = np.where(np.mod(size, 2.0 * multiple) > 0.0, entry, reached)
        share = np.minimum(share, reached)
    return share


def _smooth(m: FloatArray, n: FloatArray, k: FloatArray, rates: ProductRates) -> FloatArray:
    share = (m / (m + rates.half_m)) * (n / (n + rates.half_n)) * (k / (k + rates.half_k))
    return 2.0 * m * n * k / (rates.achieved * share)


def _tiled(
    m: FloatArray, n: FloatArray, k: FloatArray, rates: ProductRates, tiles: MatrixTiles, together: FloatArray | float
) -> FloatArray:
    """The fastest of the tiles: libraries choose among kernels by shape."""
    steps = 2.0 * (np.ceil(k / tiles.step) * tiles.step + tiles.depth) / rates.achieved
    stored = tiles.store * rates.result / rates.bandwidth
    first = 1.0 + tiles.load * sum(1.0 / side for side in tiles.sizes[0])
    best = np.full(np.broadcast(m, n, k, rates.achieved).shape, np.inf)
    for rows, columns in tiles.sizes:
        waves = together * np.ceil(m / rows) * np.ceil(n / columns) / tiles.units
        waves = np.maximum(1.0, tiles.tail * np.ceil(waves) + (1.0 - tiles.tail) * waves)
        slower = (1.0 + tiles.load * (1.0 / rows + 1.0 / columns)) / first
        best = np.minimum(best, waves * (rows * columns) * (steps * slower + stored))
    read = np.where(np.asarray(together) > 1.0, tiles.cold * rates.operand * (m * k + k * n) / rates.bandwidth, 0.0)
    return best * tiles.units / together + read
