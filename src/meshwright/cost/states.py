"""Bytes of every copy of a parameter that training keeps: parameters, gradients, optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS, SHARDINGS, BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Sharding

_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO2 = SHARDINGS.index(Sharding.GRADIENTS)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
_QUANTIZED_COPIES = 2.0  # a weight's eight-bit copy by rows and one by columns, kept over the microbatches of a step


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Parameters of every rank, shape (rows, ranks): `whole` before sharding and `owned` after it; `layers` of the
    former are in layers."""

    whole: FloatArray
    owned: FloatArray
    layers: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of parameters, optimizer state and gradients of every rank, shape (rows, ranks).

    Gradients that exist `before` the backward at the peak, and `after` the step's last one; `wire` holds gradients on
    their way in less precision.
    """

    parameters: FloatArray
    optimizer: FloatArray
    before: FloatArray
    after: FloatArray
    wire: FloatArray


def states(table: PlanTable, local: Local, *, summed: BoolArray, away: BoolArray, software: Software) -> States:
    """What each rank keeps of its parameters.

    Where gradients are `summed` over microbatches, their sum is there at the peak; where the optimizer's state is
    `away` in the host's memory, none of it is here.
    """
    kept = _with_copies(table, local) if software.keeps_copies else _masters(table, local, summed=summed)
    return replace(kept, optimizer=np.where(away[:, None], 0.0, kept.optimizer))


def _masters(table: PlanTable, local: Local, *, summed: BoolArray) -> States:
    """Parameters are the optimizer's masters; zero1 sums whole gradients until it scatters them once."""
    sizes = state_bytes(table)
    master, compute, reduced = (size[:, None] for size in (sizes.master, sizes.compute, sizes.reduced))
    sharding = table.sharding[:, None]
    sharded = sharding > 0
    whole = np.where(sharded & (sharding < _ZERO3), compute, 0.0)
    bucketed = ~sharded & (table.data[:, None] > 1)
    share = np.where(sharding == _ZERO1, local.whole, local.owned) * master
    return States(
        parameters=local.owned * master + local.whole * whole,
        optimizer=local.owned * 2.0 * master,
        before=np.where(bucketed | summed, share, 0.0),
        after=share + np.where(sharding == _ZERO1, local.owned * master, 0.0),
        wire=np.where(bucketed & (reduced < master), local.whole * reduced, 0.0),
    )


def _with_copies(table: PlanTable, local: Local) -> States:
    """Parameters in the precision that multiplies beside fp32 masters, and gradients in one buffer that stays.

    Gradients that add up in less than fp32 are copied to fp32 for the optimizer's step.
    """
    sizes = state_bytes(table)
    master, compute, reduced = (size[:, None] for size in (sizes.master, sizes.compute, sizes.reduced))
    sharding = table.sharding[:, None]
    narrow = compute < master
    added = np.where(narrow, reduced, master)
    gradients = np.where(sharding < _ZERO2, local.whole, local.owned) * added
    quantized = np.asarray([entry.quantized for entry in PRECISIONS])[table.precision][:, None]
    held = np.where(sharding < _ZERO3, local.whole, local.owned) * compute
    return States(
        parameters=held + np.where(quantized, _QUANTIZED_COPIES * local.layers, 0.0),
        optimizer=local.owned * (2.0 * master + np.where(narrow, master, 0.0)),
        before=gradients,
        after=gradients + np.where(added < master, local.owned * master, 0.0),
        wire=np.zeros_like(gradients),
    )
