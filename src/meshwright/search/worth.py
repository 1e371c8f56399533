"""How many times as many steps each way of meeting takes to the same loss: what its plans count for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from meshwright.cost.synchronize import compresses
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.plan import Plan
from meshwright.spec.synchronize import SyncKind

SMALL, LARGE = 5.4e6, 4e9  # parameters
# After 125 steps of 1,024 tokens of SMALL parameters with two learners (`python benchmarks/network/losses.py`,
# docs/lab.md); `local` and `co2`, which were not measured, stand behind `diloco`.
MEASURED: Mapping[SyncKind, float] = {
    SyncKind.EVERY_STEP: 1.0,
    SyncKind.EAGER: 1.02,
    SyncKind.STREAMING: 1.13,
    SyncKind.DILOCO: 1.2,
    SyncKind.LOCAL: 1.22,
    SyncKind.CO2: 1.25,
}
TRIED = (SyncKind.EAGER, SyncKind.STREAMING, SyncKind.DILOCO)  # kinds of learners of which it was measured
MEASURED_COMPRESSED = 1.4
# Of LARGE ones learners' losses are those of every step (2503.09799, 2501.18512): they are to save as little as small
# models' streams, in the order of small models' losses.
PUBLISHED: Mapping[SyncKind, float] = {
    SyncKind.EVERY_STEP: 1.0,
    SyncKind.EAGER: 1.03,
    SyncKind.STREAMING: 1.031,
    SyncKind.DILOCO: 1.032,
    SyncKind.LOCAL: 1.035,
    SyncKind.CO2: 1.07,
}
PUBLISHED_COMPRESSED = 1.03
DOUBLED = 0.0025  # that every doubling of two learners adds


def worth_of_kind(kind: SyncKind, *, parameters: float) -> float:
    """Of two learners of a model of so many parameters, between SMALL and LARGE by the logarithm."""
    return _between(MEASURED[kind], PUBLISHED[kind], parameters)


def worth_of_compressed(parameters: float) -> float:
    """Of gradients that meet compressed in every step."""
    return _between(MEASURED_COMPRESSED, PUBLISHED_COMPRESSED, parameters)


def worth(plan: Plan, *, parameters: float) -> float:
    """Times the step of `plan` that it counts for."""
    if plan.learners > 1:
        return worth_of_kind(plan.gradients.kind, parameters=parameters) + DOUBLED * math.log2(plan.learners / 2)
    return worth_of_compressed(parameters) if plan.gradients.compression is not None else 1.0


def worth_of_rows(table: PlanTable, *, parameters: float) -> FloatArray:
    """As `worth`, of every row, shape (rows,)."""
    found = np.where(compresses(table), worth_of_compressed(parameters), 1.0)
    if table.has_learners:
        kinds = np.array([worth_of_kind(meeting.kind, parameters=parameters) for meeting in table.syncs])[table.sync]
        found = np.where(table.learners > 1, kinds + DOUBLED * np.log2(table.learners / 2.0), found)
    return found


def _between(small: float, large: float, parameters: float) -> float:
    share = min(max(math.log(max(parameters, 1.0) / SMALL) / math.log(LARGE / SMALL), 0.0), 1.0)
    return small + share * (large - small)
