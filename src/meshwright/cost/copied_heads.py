"""Key-value heads that several tensor ranks hold: what a rank has of them, and what their holders sum.

Of fewer heads than ranks each rank has one, as many ranks the same one (as Megatron-LM and vLLM lay them). Each finds
the share of its own query heads in that head's gradient, and the holders add them up once a step.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Attention, Block, Layer
from meshwright.spec.part_tensors import ParameterTensor, part_tensors
from meshwright.spec.tensors import tensors


def divided_by(tensor: ParameterTensor, ranks: FloatArray) -> FloatArray:
    """Into how many parts `ranks` tensor ranks on a line divide a parameter that they do: no more than it has runs."""
    return ranks if tensor.runs is None else np.minimum(ranks, float(tensor.runs))


def beside_even_share(mixer: Attention, ranks: FloatArray) -> FloatArray:
    """Parameters of `mixer` that a rank has above an even share of all that tensor ranks divide."""
    found = np.zeros_like(ranks)
    for entry in part_tensors("mixer", mixer):
        if entry.divided is not None and entry.runs is not None:
            found = found + entry.size * (1.0 / divided_by(entry, ranks) - 1.0 / ranks)
    return found


def summed_copies(block: Block, table: PlanTable) -> FloatArray | None:
    """Elements of gradients that holders of the same head sum once a step, shape (rows,); None where no head is held
    by several."""
    heads, ranks = heads_of(block), np.where(table.tensor_grid > 0, 1, table.tensor).astype(np.float64)
    if heads is None or not (ranks > heads).any():
        return None
    sizes = sum(entry.size for entry in tensors(block) if entry.divided is not None and entry.runs is not None)
    return np.where(ranks > heads, sizes / float(heads), 0.0)


def heads_of(block: Block) -> int | None:
    """Key-value heads of a layer's mixer; None where it has none that tensor ranks divide."""
    mixer = block.mixer if isinstance(block, Layer) else None
    return mixer.kv_heads if isinstance(mixer, Attention) else None
