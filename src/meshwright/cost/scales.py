"""Scales of whole tensors: tensor ranks tell each other the largest numbers of what they multiply in few bits.

Each of a linear's three products compares the magnitudes of both its operands first (parallel/quantized.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from meshwright.cost.overlap import Traffic
from meshwright.cost.shared_features import Features, Shared, TensorLinks
from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.blocks import Attention, Block, FeedForward, Layer, Mixture
from meshwright.spec.cluster import Precision
from meshwright.spec.model import LatentAttention

OPERANDS = 2.0  # of a product, each with one number
_FP32 = 4.0
_BACKWARD = 2.0  # products for the gradients of what was read and of the matrix
# Recipes with a scale that is of a whole tensor (spec in parallel/quantized.py: `recipe`).
COMPARES: Mapping[Precision, bool] = MappingProxyType(
    {entry: entry in (Precision.FP8, Precision.NVFP4) for entry in Precision}
)
_ROWS = np.array([COMPARES[entry] for entry in PRECISIONS])


def linears(layer: Layer) -> int:
    """Matrices of `layer` that multiply rounded operands, each factor of one of low rank by itself; experts, routers
    and gates are none of them."""
    found = len(layer.ranks)
    for part in layer.places.values():
        if isinstance(part, Attention):
            found += 3 if part.shared_key_value else 4
        elif isinstance(part, LatentAttention):
            found += 5 if part.query_rank else 4
        elif isinstance(part, FeedForward):
            found += _matrices(part)
        elif isinstance(part, Mixture) and part.shared is not None:
            found += _matrices(part.shared)
    return found


def expert_products(part: Mixture, *, holders: int, choices: int) -> int:
    """Matrices of the experts that one of `holders` multiplies where so many `choices` come to it."""
    return min(part.experts // holders, choices) * _matrices(part)


def with_scales(shared: Shared, block: Block, table: PlanTable, *, links: TensorLinks, software: Software) -> Shared:
    """`shared` and what `block` waits for scales on a line of tensor ranks: of experts too where those divide them."""
    rows = _ROWS[table.precision] & (table.tensor > 1) & (table.tensor_grid == 0)
    if not software.agrees_on_scales or not isinstance(block, Layer) or not rows.any():
        return shared
    part = block.transform
    whole = part.experts * _matrices(part) if isinstance(part, Mixture) else 0
    count = np.where(rows, linears(block) + np.where(table.on_grid, 0, whole), 0.0)
    each = OPERANDS * _FP32

    def more(features: Features, times: FloatArray) -> Features:
        seconds = times * links.reduce.seconds(np.full(len(table), each))
        waits = Traffic.over(seconds, links.way, num_bytes=2.0 * each * times)
        return Features(waits=features.waits + waits, beside=features.beside, held_up=features.held_up)

    return Shared(
        forward=more(shared.forward, count),
        again=more(shared.again, count),
        backward=more(shared.backward, _BACKWARD * count),
        moved=shared.moved + (1.0 + _BACKWARD) * each * count,
    )


def _matrices(part: FeedForward | Mixture) -> int:
    return 3 if part.gated else 2
