"""How little room some ranks of a plan have beside the largest device that it uses."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.placement import covers
from meshwright.spec.cluster import ClusterSpec

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def device_rooms(cluster: ClusterSpec) -> tuple[float, ...]:
    """Bytes that a device of each node group may hold."""
    return tuple(group.device.memory_bytes * group.device.usable_fraction for group in cluster.groups)


def largest_room(table: PlanTable, *, cluster: ClusterSpec) -> Floats:
    """Bytes of the largest device that each plan uses, shape (rows,)."""
    starts = [0, *accumulate(group.num_devices for group in cluster.groups)][:-1]
    found = np.zeros(len(table))
    for start, own in zip(starts, device_rooms(cluster), strict=True):
        found = np.where(table.world > start, np.maximum(found, own), found)
    return found


def scarcity(table: PlanTable, rank: Ids, *, cluster: ClusterSpec) -> Floats | float:
    """Times the room of each pipeline rank in `rank`, shape (rows, ranks), that `largest_room` is: what such a rank
    holds fills its devices as so many times as much would fill the largest."""
    rooms = device_rooms(cluster)
    if len(set(rooms)) == 1:
        return 1.0
    own = np.where(covers(table, rank, cluster=cluster), np.array(rooms), np.inf).min(axis=-1)
    return np.asarray(largest_room(table, cluster=cluster)[:, None] / own)
