"""What sharded parameters and gradients add to a step at the least: what the work on their way cannot hide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.network import Linear, collective
from meshwright.cost.overlap import Contention, Traffic
from meshwright.cost.placement import distinct, ring
from meshwright.cost.software import Software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import SCHEDULES, SHARDINGS
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, NodeGroup
from meshwright.spec.plan import AxisName, ScheduleKind, Sharding

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_ZERO1, _ZERO2, _ZERO3 = (
    SHARDINGS.index(kind) for kind in (Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)
)
_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_SHARDS = (AxisName.SHARD, AxisName.CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasts:
    """Seconds of one pass of one microbatch on every rank shown, shape (rows, ranks): the `whole` of it, and for how
    long work, links in the node and adapters keep it busy."""

    whole: Floats
    work: Floats
    near: Floats
    far: Floats

    def take(self, rows: Ids) -> Lasts:
        return Lasts(whole=self.whole[rows], work=self.work[rows], near=self.near[rows], far=self.far[rows])

    def beside(self, traffic: Traffic, contention: Contention | None) -> Floats:
        """Its seconds with so much more traffic, which waits for no single block."""
        if contention is None:
            return np.asarray(self.whole + traffic.whole)
        bounds = self.work + contention.added(traffic), self.near + traffic.near, self.far + traffic.far
        return np.asarray(np.max([self.whole, *bounds], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one microbatch on every rank shown, shape (rows, ranks): seconds `before` a rank's first work and after its
    last, its own passes, the `parameters` that its data parallel ranks share, and those of `experts` on a grid."""

    before: Floats
    forward: Lasts
    backward: Lasts
    parameters: Floats
    experts: Floats

    def take(self, rows: Ids) -> Work:
        return Work(
            before=self.before[rows],
            forward=self.forward.take(rows),
            backward=self.backward.take(rows),
            parameters=self.parameters[rows],
            experts=self.experts[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    gather: Linear
    scatter: Linear
    reduce_replicas: Linear
    reduce_all: Linear
    sharded_far: Mask
    replicas_far: Mask
    all_far: Mask


def least_seconds(
    table: PlanTable,
    work: Work,
    *,
    contention: Contention | None,
    group: NodeGroup,
    cluster: ClusterSpec,
    software: Software,
) -> Floats:
    """Seconds from the first forward until gradients are reduced, on nodes like those of `group`, shape (rows,).

    What a rank exchanges is taken as one collective, which is never slower than one for each block, and hides behind
    all of the rank's blocks. What is reduced once a step travels beside the last backward of the first rank, and what
    is gathered once beside its first forward.
    """
    count, sharding = table.microbatches[:, None], table.sharding[:, None]
    if group.device.kind is DeviceKind.CPU:
        return np.asarray((work.before + count * (work.forward.whole + work.backward.whole)).max(axis=1))
    links = _links(table, group=group, cluster=cluster, software=software)
    sizes = state_bytes(table, narrow=software.narrow_parameters)
    gathered, reduced = (work.parameters * size[:, None] for size in (sizes.gathered, sizes.reduced))
    far, together = links.sharded_far[:, None], links.all_far[:, None]
    gather = _over(links.gather.seconds(gathered), far)
    scatter = _over(links.scatter.seconds(reduced), far)
    replicas = links.reduce_replicas.seconds(reduced / table.divided[:, None])
    every = np.where(table.schedule == _BREADTH_FIRST, 1.0 / table.microbatches, 1.0)[:, None]
    ahead = gather.where(sharding == _ZERO3).times(every)
    behind = ahead + scatter.where(sharding >= _ZERO2).times(every)
    once = scatter.where(sharding == _ZERO1)
    once = once + _over(replicas, links.replicas_far[:, None]).where(sharding > 0)
    once = once + _over(links.reduce_all.seconds(reduced), together).where(sharding == 0)
    first = gather.where((sharding > 0) & (sharding < _ZERO3))
    forward, backward = work.forward.beside(ahead, contention), work.backward.beside(behind, contention)
    late = work.backward.beside(behind + once, contention) - backward
    early = work.forward.beside(ahead + first, contention) - forward
    ranks = work.before + count * (forward + backward)
    return np.asarray(np.maximum(ranks.max(axis=1), (ranks + late + early)[:, 0]))


def _over(seconds: Floats, far: Mask) -> Traffic:
    """All of it over adapters where they are `far`, and nothing on the lanes to them, which may be free."""
    away = np.where(far, seconds, 0.0)
    return Traffic(near=seconds - away, far=away, lanes=np.zeros_like(away))


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
        sharded_far=(shards.racks > 1.0)[inverse],
        replicas_far=(replicas.racks > 1.0)[inverse],
        all_far=(both.racks > 1.0)[inverse],
    )
