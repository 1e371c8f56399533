"""Costs: what `evaluate` finds for every row of a plan table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from meshwright.cost.table import BoolArray, IntArray
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one step and bytes at its peak, row by row.

    `step_seconds` (rows,) is the sum of `parts` (LineName to (rows,)), exposed seconds on the busiest pipeline rank.
    `memory` maps MemoryPart to (rows, ranks) bytes, and `host` are those in the host's memory, of `host_room`; `ranks`
    names the pipeline ranks and `valid` those that exist: ranks that are alike are shown once, by the heaviest.
    `memory_bytes` is the heaviest rank's total, `capacity` what a device may use there and `fits` whether every
    rank fits. `paced` is the node group on which the `busiest` rank is slowest. `total` holds whole times of
    collectives, hidden ones included, under the names of `parts`. `figures` holds other numbers by name. `every` is how
    many steps a round of learners has, 0 where all ranks meet in every step. `detail`, where every rank is shown, maps
    (pass, part name) to seconds of one step on the busiest rank.
    """

    step_seconds: FloatArray
    parts: Mapping[str, FloatArray]
    total: Mapping[str, FloatArray]
    memory: Mapping[str, FloatArray]
    host: FloatArray
    host_room: FloatArray
    ranks: IntArray
    valid: BoolArray
    capacity: FloatArray
    memory_bytes: FloatArray
    fits: BoolArray
    tokens_per_step: FloatArray
    busiest: IntArray
    paced: IntArray
    every: IntArray
    detail: Mapping[tuple[str, str], FloatArray] = field(default_factory=dict)
    figures: Mapping[str, FloatArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.step_seconds.shape[0])

    def row(self, index: int) -> Costs:
        """Those of one row."""
        return self.take(slice(index, index + 1))

    def take(self, chosen: slice | IntArray) -> Costs:
        """Those of the rows chosen, in their order."""
        found: dict[str, Any] = {}
        for entry in fields(self):
            values = getattr(self, entry.name)
            each = isinstance(values, Mapping)
            found[entry.name] = {name: one[chosen] for name, one in values.items()} if each else values[chosen]
        return Costs(**found)

    @property
    def tokens_per_second(self) -> FloatArray:
        return self.tokens_per_step / self.step_seconds

    @property
    def finite(self) -> BoolArray:
        return np.asarray(np.isfinite(self.step_seconds))
