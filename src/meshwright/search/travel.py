"""What sharded parameters and gradients add to a step at the least: what the work on their way cannot hide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.network import Linear, collective
from meshwright.cost.placement import distinct, ring
from meshwright.cost.software import Software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import SCHEDULES, SHARDINGS
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, NodeGroup
from meshwright.spec.plan import AxisName, ScheduleKind, Sharding

Floats = npt.NDArray[np.float64]
_ZERO1, _ZERO2, _ZERO3 = (
    SHARDINGS.index(kind) for kind in (Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)
)
_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_SHARDS = (AxisName.SHARD, AxisName.CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one microbatch on every rank shown, shape (rows, ranks): seconds `before` a rank's first work and after its
    last, its own seconds `forward` and `backward`, and the `parameters` that its data parallel ranks share."""

    before: Floats
    forward: Floats
    backward: Floats
    parameters: Floats

    @property
    def busy(self) -> Floats:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    gather: Linear
    scatter: Linear
    reduce_replicas: Linear
    reduce_all: Linear


def least_seconds(
    table: PlanTable, work: Work, *, group: NodeGroup, cluster: ClusterSpec, software: Software
) -> Floats:
    """Seconds from the first forward until gradients are reduced, on nodes like those of `group`, shape (rows,).

    What a rank exchanges is taken as one collective, which is never slower than one for each block. Gradients that
    are reduced once a step wait for the first rank's last backward; what every microbatch exchanges leaves less of it
    to hide behind, so that there nothing is counted. Nothing hides more than lasts what it runs beside.
    """
    count = table.microbatches[:, None]
    if group.device.kind is DeviceKind.CPU:
        return np.asarray((work.before + count * work.busy).max(axis=1))
    links = _links(table, group=group, cluster=cluster, software=software)
    sizes, sharding = state_bytes(table, narrow=software.narrow_parameters), table.sharding
    gathered, reduced = ((work.parameters * size[:, None]) for size in (sizes.gathered, sizes.reduced))
    hidden = 1.0 if software.overlap else 0.0
    gather = 2.0 * links.gather.seconds(gathered)
    scatter = links.scatter.seconds(reduced)
    times = np.where(table.schedule == _BREADTH_FIRST, 1.0 / table.microbatches, 1.0)[:, None]
    sent = np.where(sharding[:, None] == _ZERO3, gather, 0.0) + np.where(sharding[:, None] >= _ZERO2, scatter, 0.0)
    ranks = work.before + count * (work.busy + _left(sent * times, hidden * work.busy))
    once = np.where(sharding == _ZERO1, scatter[:, 0], 0.0) + np.where(
        sharding > 0,
        links.reduce_replicas.seconds(reduced[:, 0] / table.divided),
        links.reduce_all.seconds(reduced[:, 0]),
    )
    first = np.where((sharding > 0) & (sharding < _ZERO3), 0.5 * gather[:, 0], 0.0)
    hides = sharding < _ZERO2
    hides = hides | (not software.overlap)
    after = np.where(hides, _left(once, hidden * work.backward[:, 0]), 0.0)
    ahead = np.where(hides, _left(first, hidden * work.forward[:, 0]), 0.0)
    return np.asarray(np.maximum(ranks.max(axis=1), ranks[:, 0] + after + ahead))


def _left(seconds: Floats, beside: Floats) -> Floats:
    return np.asarray(np.maximum(seconds - beside, 0.0), dtype=np.float64)


def _links(table: PlanTable, *, group: NodeGroup, cluster: ClusterSpec, software: Software) -> _Links:
    some, inverse = distinct(table)
    shards, replicas, both = (
        ring(some, axes, group=group, cluster=cluster)
        for axes in (_SHARDS, (AxisName.REPLICATE,), (AxisName.REPLICATE, *_SHARDS))
    )
    scatters = Collective.ALL_TO_ALL if software.exchanges_scatter(group.device.kind) else Collective.REDUCE_SCATTER
    gather, scatter, reduce_replicas, reduce_all = (
        collective(operation, around, group=group, cluster=cluster).take(inverse)
        for operation, around in (
            (Collective.ALL_GATHER, shards),
            (scatters, shards),
            (Collective.ALL_REDUCE, replicas),
            (Collective.ALL_REDUCE, both),
        )
    )
    return _Links(
        gather=gather,
        scatter=scatter,
        reduce_replicas=reduce_replicas,
        reduce_all=reduce_all,
    )
