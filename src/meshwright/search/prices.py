"""Prices of a whole space: rows that cannot fit left out first, the others priced in slices of bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.fitting import probability
from meshwright.cost.uncertainty import upper
from meshwright.search.states_held import least_states
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.units import format_bytes

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]
SLICE_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the search keeps of the costs of every row: seconds of a step, bytes at the peak and what there is, and
    what the host's memory has no room for.

    Nineteen of twenty measured steps stay under `upper_seconds`, which a cautious ranking minimises. `every` is how
    many steps a round of learners has.
    """

    step_seconds: Floats
    upper_seconds: Floats
    memory_bytes: Floats
    capacity: Floats
    host_missing: Floats
    fits: Mask
    fit_probability: Floats
    finite: Mask
    every: Ids

    def __len__(self) -> int:
        return int(self.step_seconds.shape[0])

    @property
    def filled(self) -> Floats:
        """What is needed as a share of what there is, on the device or, where there is too little, with the host."""
        over = np.maximum(self.memory_bytes - self.capacity, 0.0) + self.host_missing
        return np.where(over > 0.0, 1.0 + over / self.capacity, self.memory_bytes / self.capacity)

    def need(self, row: int) -> str:
        """`needs 90.3 GiB, has 74.4 GiB`, of the device's memory or what the host's has no room for, or of both."""
        need, has, missing = (float(each[row]) for each in (self.memory_bytes, self.capacity, self.host_missing))
        beside = f"needs {format_bytes(missing)} more of the host's memory than its share"
        here = f"needs {format_bytes(need)}, has {format_bytes(has)}"
        return here if not missing else beside if need <= has else f"{here}, and {beside}"

    def take(self, rows: npt.NDArray[np.intp] | slice) -> Prices:
        return Prices(**{field.name: getattr(self, field.name)[rows] for field in fields(Prices)})

    @classmethod
    def joined(cls, parts: Sequence[Prices]) -> Prices:
        """The rows of all parts in order."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(Prices)]
        return Prices(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def price(table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Prices:
    """The prices of every row of a table that has rows."""
    found = []
    for start in range(0, len(table), SLICE_ROWS):
        part = table.take(slice(start, start + SLICE_ROWS))
        costs = cost.evaluate(part, model=model, cluster=cluster, job=job)
        room = np.asarray(costs.capacity, dtype=np.float64)
        found.append(
            Prices(
                step_seconds=costs.step_seconds,
                upper_seconds=upper(costs, part, model=model, cluster=cluster, job=job),
                memory_bytes=costs.memory_bytes,
                capacity=room if room.ndim < 2 else room.min(axis=1),
                host_missing=np.maximum(costs.host - costs.host_room, 0.0).max(axis=1),
                fits=costs.fits,
                fit_probability=probability(
                    costs.memory, capacity=room, valid=costs.valid, host=costs.host, host_room=costs.host_room
                ),
                finite=costs.finite,
                every=costs.every,
            )
        )
    return Prices.joined(found)


def may_fit(table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Mask:
    """Rows whose parameters and optimizer state alone fit on the largest device; no row that fits is left out."""
    room = max(group.device.memory_bytes for group in cluster.groups)
    return np.asarray(least_states(table, model=model, job=job) <= room, dtype=np.bool_)
