"""How tensor ranks share a vocabulary: equal runs of its rows, of which the last is shorter where it has to be."""

from __future__ import annotations

import math

import numpy as np

from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Head


def first_rows(vocab: int, tensor: FloatArray) -> FloatArray:
    """Rows of the first of `tensor` ranks, which has as many as any: what it does and holds is the most."""
    return np.asarray(np.ceil(vocab / tensor), dtype=np.float64)


def rows_of(vocab: int, *, tensor: int, rank: int) -> tuple[int, int]:
    """Of rank `rank` of `tensor` the first row, and how many it has."""
    each = math.ceil(vocab / tensor)
    first = min(rank * each, vocab)
    return first, min(each, vocab - first)


def table_elements(head: Head, table: PlanTable) -> FloatArray:
    """Elements of the first tensor rank's part of the table that `head` multiplies with, shape (rows,)."""
    whole = float(head.matrix_parameters)
    on_line = first_rows(head.vocab, table.tensor.astype(np.float64)) * head.width
    return np.where(table.tensor_grid > 0, whole / table.tensor, on_line)
