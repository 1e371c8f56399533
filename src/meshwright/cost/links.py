"""Every collective of a step laid on the machines: over each axis, and over the grid of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshwright.cost.copied_heads import heads_of
from meshwright.cost.exchanges import ContextLinks, ExpertLinks, LayerLinks
from meshwright.cost.grid_rows import grid_dims
from meshwright.cost.layouts import Kind
from meshwright.cost.network import Linear, collective, hand_on, occupied, over_sockets, send
from meshwright.cost.overlap import Contention, Mutual, Way
from meshwright.cost.placement import Ring, axis_sizes, distinct, lay, strides
from meshwright.cost.processor import Sharing, share
from meshwright.cost.shared_features import TensorLinks
from meshwright.cost.software import Software
from meshwright.cost.synchronize import DataLinks
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, NodeGroup
from meshwright.spec.plan import AxisName
from meshwright.spec.report import LineName

Dim = tuple[IntArray, IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLinks:
    """Collectives among the ranks that hold the same in every learner, one entry a row: whole, and as far as a
    device's own links carry them, between sites nothing waited for. They go their `way`; `held` of a device's compute
    carries them. `far` are the lines of a step whose collectives go over adapters."""

    whole: Mapping[Collective, Linear]
    near: Mapping[Collective, Linear]
    way: Way
    held: FloatArray
    far: Mapping[LineName, BoolArray]


@dataclass(frozen=True, kw_only=True)
class _Floor:
    """Rows that lie alike on nodes like those of `group`, priced once; `inverse` says which of them every row is."""

    table: PlanTable
    inverse: npt.NDArray[np.intp]
    group: NodeGroup
    cluster: ClusterSpec
    software: Software

    @property
    def scatter(self) -> Collective:
        exchanges = self.software.exchanges_scatter(self.group.device.kind)
        return Collective.ALL_TO_ALL if exchanges else Collective.REDUCE_SCATTER

    def around(self, *dims: Dim) -> Ring:
        return lay(self.table, dims, group=self.group, cluster=self.cluster)

    def price(self, operation: Collective, ring: Ring) -> Linear:
        priced = collective(operation, ring, group=self.group, cluster=self.cluster).slowed(self._beside(ring))
        return priced.later(self._dated(operation, ring)).take(self.inverse)

    def hop(self, around: Ring) -> Linear:
        """One message to the next rank of a ring: the slowest of its links decides, rings of a node share its adapters.

        In a rack no ring leaves its links. A link between two ranks that were alone is slower where all of a stage use
        their cores.
        """
        group = self.group
        near, met = hand_on(
            group.rack or group.inside, ranks=around.size, senders=np.ones_like(around.size), adapters=1.0
        )
        near = over_sockets(near, group.inside, flows=around.crossing)
        far, _ = hand_on(
            group.nic, ranks=around.size, senders=group.devices_per_node / around.per_node, adapters=float(group.nics)
        )
        near = near.slowed(self._beside(around) if met else self._sharing.lockstep)
        apart = around.racks > 1.0
        return Linear(
            latency=np.where(apart, far.latency, near.latency), per_byte=np.where(apart, far.per_byte, near.per_byte)
        )

    @cached_property
    def _sharing(self) -> Sharing:
        world, pipeline = (values.astype(np.float64) for values in (self.table.world, self.table.pipeline))
        return share(self.group, world=world, pipeline=pipeline)

    def _beside(self, ring: Ring) -> FloatArray:
        """Groups beside this one contend for the cores; ranks of this one do so in its measured times already."""
        sharing = self._sharing
        return np.maximum(sharing.lockstep / sharing.slowdown(ring.per_node), 1.0)

    def _dated(self, operation: Collective, ring: Ring) -> FloatArray:
        """What a collective takes longer, by its steps in a node, with the library of the software's time."""
        if self.group.device.kind is not DeviceKind.CUDA:
            return np.zeros_like(ring.size)
        turns = 2.0 if operation is Collective.ALL_REDUCE else 1.0
        late = self.software.collective_seconds + turns * (ring.per_node - 1.0) * self.software.step_seconds
        return np.where(ring.size > 1.0, late, 0.0)

    def way(self, ring: Ring, *, turns: float = 1.0, direct: bool = False) -> Way:
        """Of collectives that pass a tensor around `ring` so many times, or whose ranks send each of the others theirs.

        A device sends through its adapter what leaves the node, or rack, divided over the ranks of the group there.
        Where a node has no links but its devices' lanes, they carry what stays in it.
        """
        far, host, inside = ring.racks > 1.0, self.group.host, self.group.inside
        share = (ring.size - ring.fewest_rack if direct else (ring.size - 1.0) / ring.fewest_rack) / ring.size
        rate = np.inf if host is None else host.bandwidth * host.efficiency
        only_lanes = host is not None and inside.bandwidth <= host.bandwidth
        within = (ring.size - 1.0) / ring.size if only_lanes else np.zeros_like(ring.size)
        return Way(far=far[self.inverse], lanes=(turns * np.where(far, share, within) / rate)[self.inverse])

    def data(self, replicas: Dim, *shards: Dim) -> DataLinks:
        sharded, copies, both = self.around(*shards), self.around(replicas), self.around(replicas, *shards)
        return DataLinks(
            gather=self.price(Collective.ALL_GATHER, sharded),
            scatter=self.price(self.scatter, sharded),
            reduce_replicas=self.price(Collective.ALL_REDUCE, copies),
            reduce_all=self.price(Collective.ALL_REDUCE, both),
            sharded=self.way(sharded),
            replicas=self.way(copies, turns=2.0),
            everywhere=self.way(both, turns=2.0),
        )

    def tensor(self, dim: Dim) -> TensorLinks:
        ring = self.around(dim)
        return TensorLinks(
            reduce=self.price(Collective.ALL_REDUCE, ring),
            gather=self.price(Collective.ALL_GATHER, ring),
            scatter=self.price(self.scatter, ring),
            way=self.way(ring),
        )

    def context(self, inner: Dim, outer: Dim) -> ContextLinks:
        traders, runs = self.around(inner), self.around(outer)
        return ContextLinks(
            trade=self.price(Collective.ALL_TO_ALL, traders),
            gather=self.price(Collective.ALL_GATHER, runs),
            scatter=self.price(self.scatter, runs),
            hop=self.hop(runs).take(self.inverse),
            outer=runs.size[self.inverse],
            traders=self.way(traders, direct=True),
            runs=self.way(runs),
        )

    def experts(self, slices: Dim, experts: Dim) -> ExpertLinks:
        sliced, holders = self.around(slices), self.around(experts)
        return ExpertLinks(
            dispatch=self.price(Collective.ALL_TO_ALL, holders),
            forward=send(self.group.inside, senders=np.ones(len(self.inverse)), adapters=1.0),
            nodes=holders.racks[self.inverse],
            gather=self.price(Collective.ALL_GATHER, sliced),
            scatter=self.price(self.scatter, sliced),
            gather_tokens=self.price(Collective.ALL_GATHER, holders),
            scatter_tokens=self.price(self.scatter, holders),
            way=self.way(holders, direct=True),
        )


@dataclass(frozen=True, kw_only=True)
class Links:
    """The collectives of a step, one entry a row, each priced where it is asked for."""

    floor: _Floor

    @cached_property
    def layer(self) -> LayerLinks:
        """Those inside blocks."""
        floor, table, steps = self.floor, self.floor.table, strides(self.floor.table)
        slices, experts, _, _ = _grid(table)
        return LayerLinks(
            tensor=floor.tensor(self._axes[AxisName.TENSOR]),
            grid=tuple(floor.tensor(dim) for dim in _directions(table, steps[AxisName.TENSOR])),
            context=floor.context(*_runs(table, steps[AxisName.CONTEXT])),
            experts=floor.experts(slices, experts),
            contention=_contention(self._everyone, group=floor.group),
        )

    @cached_property
    def data(self) -> DataLinks:
        """Those over data parallel ranks, of the dense parts."""
        axes = self._axes
        return self.floor.data(axes[AxisName.REPLICATE], axes[AxisName.SHARD], axes[AxisName.CONTEXT])

    @cached_property
    def expert_data(self) -> DataLinks:
        """And of experts on a grid."""
        _, _, shards, same = _grid(self.floor.table)
        return self.floor.data(same, shards) if self.floor.table.on_grid.any() else self.data

    @cached_property
    def everyone(self) -> Linear:
        """One all-reduce over all ranks of a learner."""
        return self.floor.price(Collective.ALL_REDUCE, self._everyone)

    @cached_property
    def ends(self) -> Linear:
        """One all-reduce of the first and the last pipeline rank."""
        return self.floor.price(Collective.ALL_REDUCE, _ends(self.floor.around(self._axes[AxisName.PIPELINE])))

    @cached_property
    def rounds(self) -> RoundLinks | None:
        """What learners meet by; None where no row has some."""
        table = self.floor.table
        if not (table.learners > 1).any():
            return None
        apart = axis_sizes(table)[AxisName.REPLICATE], strides(table)[AxisName.REPLICATE]
        return _rounds(self.floor, apart, layer=self.layer, data=self.data)

    @cached_property
    def _axes(self) -> dict[AxisName, Dim]:
        """Of the replicas those of one learner."""
        table = self.floor.table
        sizes, steps = axis_sizes(table), strides(table)
        sizes = {**sizes, AxisName.REPLICATE: sizes[AxisName.REPLICATE] // table.learners}
        return {name: (sizes[name], steps[name]) for name in AxisName}

    @cached_property
    def _everyone(self) -> Ring:
        return self.floor.around(*self._axes.values())


def lay_links(table: PlanTable, *, group: NodeGroup, cluster: ClusterSpec, software: Software) -> Links:
    """The collectives of every row on nodes like those of `group`, priced once for rows that lie alike."""
    table, inverse = distinct(table)
    return Links(floor=_Floor(table=table, inverse=inverse, group=group, cluster=cluster, software=software))


def copy_links(
    table: PlanTable, kinds: Sequence[Kind], *, group: NodeGroup, cluster: ClusterSpec, software: Software
) -> dict[int, Linear]:
    """Sums among the neighbours on the tensor axis that hold the same one of so many key-value heads, by their
    number, where some row has such."""
    heads = {number for kind in kinds if (number := heads_of(kind.block)) is not None}
    shared = sorted(number for number in heads if (table.tensor > number).any())
    if not shared:
        return {}
    table, inverse = distinct(table)
    floor = _Floor(table=table, inverse=inverse, group=group, cluster=cluster, software=software)
    step = strides(table)[AxisName.TENSOR]
    holders = {number: floor.around((np.maximum(table.tensor // number, 1), step)) for number in shared}
    return {number: floor.price(Collective.ALL_REDUCE, ring) for number, ring in holders.items()}


def _ends(line: Ring) -> Ring:
    """The first and the last rank of every line alone."""
    pair = np.minimum(line.size, 2.0)
    in_node, in_rack = (np.where(boxes > 1.0, 1.0, pair) for boxes in (line.nodes, line.racks))
    return replace(
        line,
        size=pair,
        per_node=in_node,
        fewest=in_node,
        nodes=np.minimum(line.nodes, 2.0),
        per_rack=in_rack,
        fewest_rack=in_rack,
        racks=np.minimum(line.racks, 2.0),
        sites=np.minimum(line.sites, 2.0),
        crossing=np.where(line.nodes > 1.0, 0.0, line.crossing),
    )


_OF_ROUNDS = (Collective.ALL_REDUCE, Collective.ALL_TO_ALL, Collective.ALL_GATHER)


def _rounds(floor: _Floor, replicas: Dim, *, layer: LayerLinks, data: DataLinks) -> RoundLinks:
    around = floor.around(replicas)
    alone = replace(floor, cluster=floor.cluster.without_uplinks)
    far = {
        LineName.TENSOR: layer.tensor.way.far,
        LineName.CONTEXT: layer.context.traders.far | layer.context.runs.far,
        LineName.EXPERTS: layer.experts.way.far,
        LineName.PARAMETERS: data.sharded.far,
        LineName.GRADIENTS: data.sharded.far | data.everywhere.far,
    }
    return RoundLinks(
        whole={operation: floor.price(operation, around) for operation in _OF_ROUNDS},
        near={operation: alone.price(operation, around) for operation in _OF_ROUNDS},
        way=floor.way(around, turns=2.0),
        held=occupied(around, kind=floor.group.device.kind)[floor.inverse],
        far=far,
    )


def _contention(ring: Ring, *, group: NodeGroup) -> Contention:
    """Between work on a device of `group` and what runs beside it."""
    near, far = (
        float(occupied(replace(ring, racks=np.full_like(ring.racks, count)), kind=group.device.kind)[0])
        for count in (1.0, 2.0)
    )
    kind = group.device.kind
    return Contention(near=Mutual.of(near, kind=kind), far=Mutual.of(far, kind=kind))


def _runs(table: PlanTable, step: IntArray) -> tuple[Dim, Dim]:
    """The context axis in two levels: neighbours that trade heads, and runs of them."""
    return (table.inner, step), (table.context // table.inner, step * table.inner)


def _directions(table: PlanTable, step: IntArray) -> list[Dim]:
    """The tensor axis along each direction of a square or cube, the last one between neighbours; none on lines."""
    if not np.any(table.tensor_grid > 0):
        return []
    dims, side = grid_dims(table).astype(np.int64), table.side
    found = []
    for direction in range(int(dims.max())):
        inside = np.maximum(dims - 1 - direction, 0)
        found.append((np.where(direction < dims, side, 1), step * side**inside))
    return found


def _grid(table: PlanTable) -> tuple[Dim, Dim, Dim, Dim]:
    """The ranks of a stage as experts see them, the nearest first: slices, experts, shards and replicas.

    Without a grid the first two are one rank each, and the others those of the dense parts.
    """
    ones = np.ones(len(table), dtype=np.int64)
    slices = np.where(table.on_grid, table.expert_tensor, 1)
    experts = np.where(table.on_grid, table.expert, 1)
    inside = np.where(table.on_grid, slices * experts, table.tensor)
    shards = table.expert_divided
    return (slices, ones), (experts, slices), (shards, inside), (table.expert_replicas, inside * shards)
