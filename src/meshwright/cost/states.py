"""Bytes per parameter of every copy that training keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.table import PRECISIONS, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter of one row: the master copy, the copy that multiplies, gradients; shape (rows,)."""

    master: FloatArray
    compute: FloatArray
    reduced: FloatArray


def state_bytes(table: PlanTable) -> StateBytes:
    """Masters and gradients are fp32 (fp64 under fp64); the copy that multiplies has the row's precision."""

    def pick(values: list[float], index: IntArray) -> FloatArray:
        return np.asarray(values, dtype=np.float64)[index]

    return StateBytes(
        master=pick([8.0 if entry is Precision.FP64 else 4.0 for entry in PRECISIONS], table.precision),
        compute=pick([2.0 if entry.quantized else float(entry.bytes) for entry in PRECISIONS], table.precision),
        reduced=pick([float(entry.bytes) for entry in PRECISIONS], table.gradient_precision),
    )
