"""What parameters and gradients add to a step at the least: adding them up, and what work cannot hide of their way."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.kinds import accumulation_seconds
from meshwright.cost.lines import Linear
from meshwright.cost.links import lay_links
from meshwright.cost.overlap import Contention, Traffic, Way
from meshwright.cost.software import Software
from meshwright.cost.states import state_bytes
from meshwright.cost.synchronize import DataLinks, compresses, turns
from meshwright.cost.table import SHARDINGS
from meshwright.spec.cluster import ClusterSpec, DeviceKind, NodeGroup
from meshwright.spec.plan import Sharding

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
_ZERO1, _ZERO2, _ZERO3 = (
    SHARDINGS.index(kind) for kind in (Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasts:
    """Seconds of one pass of one microbatch on every rank shown, shape (rows, ranks): the `whole` of it, and for how
    long work, links in the node and adapters keep it busy."""

    whole: Floats
    work: Floats
    near: Floats
    far: Floats

    def take(self, rows: Ids) -> Lasts:
        return Lasts(**{name: getattr(self, name).take(rows, axis=0) for name in ("whole", "work", "near", "far")})

    def longer(self, seconds: Floats, contention: Contention | None) -> Lasts:
        """With so much more work, beside which links are as idle as beside the rest of it."""
        work = self.work + seconds
        if contention is None:
            return replace(self, whole=np.maximum(self.whole, work), work=work)
        near, far = (
            at + beside.idle * seconds for at, beside in ((self.near, contention.near), (self.far, contention.far))
        )
        return Lasts(whole=np.max([self.whole, work, near, far], axis=0), work=work, near=near, far=far)

    def beside(self, traffic: Traffic, contention: Contention | None) -> Floats:
        """Its seconds with so much more traffic, which waits for no single block."""
        if contention is None:
            return np.asarray(self.whole + traffic.whole)
        bounds = self.work + contention.added(traffic), self.near + traffic.near, self.far + traffic.far
        return np.asarray(np.max([self.whole, *bounds], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one microbatch on every rank shown, shape (rows, ranks): seconds `before` a rank's first work and after its
    last, in which others work for `busy_before` and add up gradients of `parameters_before`; its own passes; the
    `parameters` that its data parallel ranks share, and those of `experts` on a grid."""

    before: Floats
    busy_before: Floats
    parameters_before: Floats
    forward: Lasts
    backward: Lasts
    parameters: Floats
    experts: Floats

    def take(self, rows: Ids) -> Work:
        return Work(
            before=self.before.take(rows, axis=0),
            busy_before=self.busy_before.take(rows, axis=0),
            parameters_before=self.parameters_before.take(rows, axis=0),
            forward=self.forward.take(rows),
            backward=self.backward.take(rows),
            parameters=self.parameters.take(rows, axis=0),
            experts=self.experts.take(rows, axis=0),
        )


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
    all of the rank's blocks. What is reduced once a step travels beside a rank's last backward and then while the ranks
    before it end, and what is gathered once beside its first forward and before that while they begin.
    """
    count, sharding = table.microbatches[:, None], table.sharding[:, None]
    if group.device.kind is DeviceKind.CPU:
        return np.asarray((work.before + count * (work.forward.whole + work.backward.whole)).max(axis=1))
    moved = _moved(table, work, group=group, cluster=cluster, software=software)
    every = 1.0 / turns(table)[:, None]
    ahead = moved.gather.where(sharding == _ZERO3).times(every)
    behind = ahead + moved.scatter.where(sharding >= _ZERO2).times(every)
    whole = (sharding == 0) | ((sharding == _ZERO1) & software.reduces_whole)
    plain = ~compresses(table)[:, None]
    once = (
        moved.scatter.where((sharding == _ZERO1) & ~whole)
        + moved.replicas.where(~whole & plain)
        + moved.everywhere.where(whole & plain)
    )
    first = moved.gather.where((sharding > 0) & (sharding < _ZERO3))
    own, others = (
        accumulation_seconds(parameters, table, device=group.device, software=software)
        for parameters in (work.parameters + work.experts, work.parameters_before)
    )
    passed, before = work.backward.longer(own, contention), np.maximum(work.before, work.busy_before + others)
    forward, backward = work.forward.beside(ahead, contention), passed.beside(behind, contention)
    late = passed.beside(behind + once, contention) - backward
    early = work.forward.beside(ahead + first, contention) - forward
    return np.asarray((np.maximum(before, late + early) + count * (forward + backward)).max(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """What all parameters of every rank shown and their gradients keep links busy for, shape (rows, ranks)."""

    gather: Traffic
    scatter: Traffic
    replicas: Traffic
    everywhere: Traffic

    def __add__(self, other: _Moved) -> _Moved:
        names = [field.name for field in fields(self)]
        return _Moved(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @classmethod
    def over(cls, links: DataLinks, *, gathered: Floats, reduced: Floats, divided: Ids) -> _Moved:
        def traffic(linear: Linear, way: Way, num_bytes: Floats) -> Traffic:
            return Traffic.over(np.where(num_bytes > 0.0, linear.seconds(num_bytes), 0.0), way, num_bytes=num_bytes)

        return cls(
            gather=traffic(links.gather, links.sharded, gathered),
            scatter=traffic(links.scatter, links.sharded, reduced),
            replicas=traffic(links.reduce_replicas, links.replicas, reduced / divided[:, None]),
            everywhere=traffic(links.reduce_all, links.everywhere, reduced),
        )


def _moved(table: PlanTable, work: Work, *, group: NodeGroup, cluster: ClusterSpec, software: Software) -> _Moved:
    """Of the dense parts, and of experts where there is a grid."""
    links = lay_links(table, group=group, cluster=cluster, software=software)
    data, expert_data = links.data, links.expert_data
    sizes = state_bytes(table, narrow=software.narrow_parameters)

    def over(links: DataLinks, parameters: Floats, divided: Ids) -> _Moved:
        gathered, reduced = (parameters * size[:, None] for size in (sizes.gathered, sizes.reduced))
        return _Moved.over(links, gathered=gathered, reduced=reduced, divided=divided)

    dense = over(data, work.parameters, table.divided)
    return dense + over(expert_data, work.experts, table.expert_divided) if work.experts.any() else dense
