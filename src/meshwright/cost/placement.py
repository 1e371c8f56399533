"""Where the ranks of every axis lie on the machines: how many in one node, how many nodes, in one rack, in one site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.plan import AxisName


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks that take part in one collective; arrays of shape (rows,).

    `size` ranks, `per_node` of them in one node, on `nodes` nodes; `racked` when one rack holds them all; `sites`
    they lie in; `rivals` groups that cross between sites at the same time.
    """

    size: FloatArray
    per_node: FloatArray
    nodes: FloatArray
    racked: BoolArray
    sites: FloatArray
    rivals: FloatArray


def strides(table: PlanTable) -> dict[AxisName, IntArray]:
    """Distance in devices between neighbours on each axis: the product of the sizes of all axes inside it."""
    sizes = axis_sizes(table)
    out = {name: np.ones(len(table), dtype=np.int64) for name in AxisName}
    for code, order in enumerate(table.orders):
        chosen = table.order == code
        stride = np.ones(len(table), dtype=np.int64)
        for name in reversed(order):
            out[name] = np.where(chosen, stride, out[name])
            stride = stride * sizes[name]
    return out


def axis_sizes(table: PlanTable) -> dict[AxisName, IntArray]:
    return {
        AxisName.PIPELINE: table.pipeline,
        AxisName.REPLICATE: table.replicate,
        AxisName.SHARD: table.shard,
        AxisName.CONTEXT: table.context,
        AxisName.TENSOR: table.tensor,
    }


def ring(table: PlanTable, axes: Sequence[AxisName], *, group: NodeGroup, cluster: ClusterSpec) -> Ring:
    """The ring that `axes` together span, on nodes like those of `group`."""
    sizes, steps = axis_sizes(table), strides(table)
    return lay(table, [(sizes[axis], steps[axis]) for axis in axes], group=group, cluster=cluster)


def lay(table: PlanTable, dims: Sequence[tuple[IntArray, IntArray]], *, group: NodeGroup, cluster: ClusterSpec) -> Ring:
    """The ring over `dims`, each of so many ranks at such a distance in devices, on nodes like those of `group`."""
    size = np.ones(len(table), dtype=np.int64)
    inside = np.ones(len(table), dtype=np.int64)
    reach = np.ones(len(table), dtype=np.int64)
    sites = np.ones(len(table), dtype=np.int64)
    per_node = group.devices_per_node
    for count, step in dims:
        span = count * step
        near = np.clip(per_node // step, 1, count)
        straddles = (span <= per_node) & (per_node % np.maximum(span, 1) != 0) & (table.world > per_node)
        near = np.where(straddles & (count > 1), -(-count // 2), near)
        size, inside = size * count, inside * near
        reach = np.where(count > 1, np.maximum(reach, span), reach)
        sites = np.maximum(sites, _sites(span, count, table.world, cluster))
    nodes = -(-size // inside)
    rack = group.rack_nodes * per_node if group.rack_nodes else 0
    return Ring(
        size=size.astype(np.float64),
        per_node=inside.astype(np.float64),
        nodes=nodes.astype(np.float64),
        racked=reach <= rack,
        sites=np.minimum(sites, size).astype(np.float64),
        rivals=table.world / size,
    )


def site_edges(cluster: ClusterSpec) -> IntArray:
    """The first device of every site but the first."""
    starts = [0, *accumulate(group.num_devices for group in cluster.groups)]
    groups = cluster.groups
    edges = [starts[i] for i in range(1, len(groups)) if groups[i].site != groups[i - 1].site]
    return np.asarray(edges, dtype=np.int64)


def _sites(span: IntArray, size: IntArray, world: IntArray, cluster: ClusterSpec) -> IntArray:
    """The most sites that one block of `span` neighbouring devices lies in; 1 where the axis has one rank."""
    crossed = np.zeros_like(span)
    for edge in site_edges(cluster):
        crossed = crossed + ((edge < world) & (edge % np.maximum(span, 1) != 0))
    return np.where(size > 1, 1 + crossed, 1)


def crossings(
    table: PlanTable, rank: IntArray, *, group: NodeGroup, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Node edges and site edges between pipeline rank 0 and each of `rank`, both of its shape (rows, ranks)."""
    device = rank * strides(table)[AxisName.PIPELINE][:, None]
    nodes = np.minimum(rank, device // group.devices_per_node)
    sites = np.minimum(np.searchsorted(site_edges(cluster), device, side="right"), nodes)
    return nodes.astype(np.float64), sites.astype(np.float64)


def covers(table: PlanTable, rank: IntArray, *, cluster: ClusterSpec) -> BoolArray:
    """Which node groups hold devices of each pipeline rank: shape (rows, ranks, groups)."""
    starts = np.asarray([0, *accumulate(group.num_devices for group in cluster.groups)], dtype=np.int64)
    step = strides(table)[AxisName.PIPELINE]
    outermost = (step * table.pipeline == table.world)[:, None]
    low = np.where(outermost, rank * step[:, None], 0)
    high = np.where(outermost, low + step[:, None], table.world[:, None])
    return np.asarray((low[..., None] < starts[1:]) & (high[..., None] > starts[:-1]), dtype=np.bool_)
