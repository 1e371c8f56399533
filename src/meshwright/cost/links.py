"""Every collective of a step laid on the machines: over each axis, and over the grid of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.exchanges import ContextLinks, ExpertLinks, LayerLinks, TensorLinks
from meshwright.cost.network import Linear, collective, occupied, send
from meshwright.cost.placement import Ring, axis_sizes, distinct, lay, strides
from meshwright.cost.processor import share
from meshwright.cost.software import Software
from meshwright.cost.synchronize import DataLinks
from meshwright.cost.table import IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, NodeGroup
from meshwright.spec.plan import AxisName

Dim = tuple[IntArray, IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The collectives of a step, one entry a row; `everyone` is one all-reduce over all ranks."""

    layer: LayerLinks
    data: DataLinks
    expert_data: DataLinks
    everyone: Linear


def lay_links(table: PlanTable, *, group: NodeGroup, cluster: ClusterSpec, software: Software) -> Links:
    """The collectives of every row on nodes like those of `group`, priced once for rows that lie alike."""
    table, inverse = distinct(table)
    sharing = share(group, world=table.world.astype(np.float64), pipeline=table.pipeline.astype(np.float64))
    sizes, steps = axis_sizes(table), strides(table)

    def around(*dims: Dim) -> Ring:
        return lay(table, dims, group=group, cluster=cluster)

    def price(operation: Collective, ring: Ring) -> Linear:
        """Groups beside this one contend for the cores; ranks of this one do so in its measured times already."""
        beside = np.maximum(sharing.lockstep / sharing.slowdown(ring.per_node), 1.0)
        priced = collective(operation, ring, group=group, cluster=cluster).slowed(beside)
        return priced.later(_dated(operation, ring, group=group, software=software)).take(inverse)

    def data_links(replicas: Dim, *shards: Dim) -> DataLinks:
        sharded, both = around(*shards), around(replicas, *shards)
        return DataLinks(
            gather=price(Collective.ALL_GATHER, sharded),
            scatter=price(scatter, sharded),
            reduce_replicas=price(Collective.ALL_REDUCE, around(replicas)),
            reduce_all=price(Collective.ALL_REDUCE, both),
            taken=occupied(both, kind=group.device.kind)[inverse],
        )

    def tensor_links(dim: Dim) -> TensorLinks:
        ring = around(dim)
        reduce, gather = price(Collective.ALL_REDUCE, ring), price(Collective.ALL_GATHER, ring)
        return TensorLinks(reduce=reduce, gather=gather, scatter=price(scatter, ring))

    axes = {name: (sizes[name], steps[name]) for name in AxisName}
    scatter = Collective.ALL_TO_ALL if software.exchanges_scatter(group.device.kind) else Collective.REDUCE_SCATTER
    data = data_links(axes[AxisName.REPLICATE], axes[AxisName.SHARD], axes[AxisName.CONTEXT])
    inner, outer = _runs(table, steps[AxisName.CONTEXT])
    runs = around(outer)
    context = ContextLinks(
        trade=price(Collective.ALL_TO_ALL, around(inner)),
        gather=price(Collective.ALL_GATHER, runs),
        scatter=price(scatter, runs),
        hop=_hop(runs, group=group).take(inverse),
        outer=runs.size[inverse],
    )
    slices, experts, shard_experts, same_experts = _grid(table)
    sliced = around(slices)
    layer = LayerLinks(
        tensor=tensor_links(axes[AxisName.TENSOR]),
        context=context,
        experts=ExpertLinks(
            dispatch=price(Collective.ALL_TO_ALL, around(experts)),
            forward=send(group.inside, senders=np.ones(len(table)), adapters=1.0),
            nodes=around(experts).racks[inverse],
            gather=price(Collective.ALL_GATHER, sliced),
            scatter=price(scatter, sliced),
        ),
    )
    return Links(
        layer=layer,
        data=data,
        expert_data=data_links(same_experts, shard_experts) if table.on_grid.any() else data,
        everyone=price(Collective.ALL_REDUCE, around(*axes.values())),
    )


def _dated(operation: Collective, ring: Ring, *, group: NodeGroup, software: Software) -> FloatArray:
    """What a collective of `ring` takes longer, by the steps in a node, with the library of the software's time."""
    if group.device.kind is not DeviceKind.CUDA:
        return np.zeros_like(ring.size)
    turns = 2.0 if operation is Collective.ALL_REDUCE else 1.0
    late = software.collective_seconds + turns * (ring.per_node - 1.0) * software.step_seconds
    return np.where(ring.size > 1.0, late, 0.0)


def _runs(table: PlanTable, step: IntArray) -> tuple[Dim, Dim]:
    """The context axis in two levels: neighbours that trade heads, and runs of them."""
    return (table.inner, step), (table.context // table.inner, step * table.inner)


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


def _hop(around: Ring, *, group: NodeGroup) -> Linear:
    """One message to the next rank of a ring: the slowest of its links decides, rings of a node share its adapters."""
    near = send(group.inside, senders=np.ones_like(around.size), adapters=1.0)
    far = send(group.nic, senders=group.devices_per_node / around.per_node, adapters=float(group.nics))
    apart = around.nodes > 1.0
    return Linear(
        latency=np.where(apart, far.latency, near.latency), per_byte=np.where(apart, far.per_byte, near.per_byte)
    )
