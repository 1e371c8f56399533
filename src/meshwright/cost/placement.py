"""Where the ranks of a group lie on the machines: how many in one node, on how many nodes, in a rack, in a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Link, NodeGroup
from meshwright.spec.plan import AxisName

Dim = tuple[IntArray, IntArray]
_FAR = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks that take part in one collective; arrays of shape (rows,), of the groups that run side by side.

    `size` ranks; the most that one node holds of any group is `per_node`, the fewest that a group which leaves its
    node has in one of its nodes is `fewest`, the most nodes that a group touches is `nodes`; `per_rack`,
    `fewest_rack` and `racks` say the same of racks (of nodes, where the cluster has no racks). `sites` they lie in,
    of which two that follow each other meet at `site_rate` bytes/s or more, infinite where there is one, and are
    `site_seconds` or less apart; `rivals` groups that cross between sites at the same time, and `crossing` those of a
    node that cross its middle, where that is a link of its own.
    """

    size: FloatArray
    per_node: FloatArray
    fewest: FloatArray
    nodes: FloatArray
    per_rack: FloatArray
    fewest_rack: FloatArray
    racks: FloatArray
    sites: FloatArray
    site_rate: FloatArray
    site_seconds: FloatArray
    rivals: FloatArray
    crossing: FloatArray


def strides(table: PlanTable) -> dict[AxisName, IntArray]:
    """Distance in devices between neighbours on each axis: the product of the sizes of all axes inside it."""
    sizes = axis_sizes(table)
    places = {name: place for place, name in enumerate(sizes)}
    inwards = np.array([[places[name] for name in reversed(order)] for order in table.orders])
    at = inwards.T[:, table.order] if len(inwards) > 1 else inwards.T
    lengths = np.stack(list(sizes.values()))
    lengths = np.take_along_axis(lengths, at, axis=0) if len(inwards) > 1 else lengths[at[:, 0]]
    steps = np.ones_like(lengths)
    np.cumprod(lengths[:-1], axis=0, out=steps[1:])
    out = np.empty_like(steps)
    np.put_along_axis(out, np.broadcast_to(at, out.shape), steps, axis=0)
    return {name: out[place] for name, place in places.items()}


def axis_sizes(table: PlanTable) -> dict[AxisName, IntArray]:
    return {
        AxisName.PIPELINE: table.pipeline,
        AxisName.REPLICATE: table.replicate,
        AxisName.SHARD: table.shard,
        AxisName.CONTEXT: table.context,
        AxisName.TENSOR: table.tensor,
    }


def distinct(table: PlanTable) -> tuple[PlanTable, npt.NDArray[np.intp]]:
    """The rows whose groups lie apart from each other's, and which of them every row of `table` is like."""
    columns = (*axis_sizes(table).values(), table.inner, table.expert, table.expert_tensor, table.order)
    columns = (*columns, table.tensor_grid, *([table.learners] if table.has_learners else []))
    key = np.zeros(len(table), dtype=np.int64)
    for column in columns:
        _, codes = _codes(column)
        key = key * (int(codes.max(initial=0)) + 1) + codes
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return table.take(first), inverse.reshape(-1)


def _codes(column: IntArray) -> tuple[IntArray, IntArray]:
    """Small numbers that stand for the values of `column`: exact where they are few, however large they are."""
    present = np.zeros(int(column.max(initial=0)) + 1, dtype=np.int64)
    present[column] = 1
    codes = np.cumsum(present) - 1
    return present, codes[column]


def ring(table: PlanTable, axes: Sequence[AxisName], *, group: NodeGroup, cluster: ClusterSpec) -> Ring:
    """The ring that `axes` together span, on nodes like those of `group`."""
    sizes, steps = axis_sizes(table), strides(table)
    return lay(table, [(sizes[axis], steps[axis]) for axis in axes], group=group, cluster=cluster)


def lay(table: PlanTable, dims: Sequence[Dim], *, group: NodeGroup, cluster: ClusterSpec) -> Ring:
    """The groups over `dims`, each of so many ranks at such a distance in devices, on nodes like those of `group`.

    Exact where neighbouring dims join into one run whose stride divides a node, however its length straddles nodes,
    and where dims lie in a node or stride over whole ones; else each dim is laid by itself and the counts multiply.
    """
    size = np.ones(len(table), dtype=np.int64)
    sites = np.ones(len(table), dtype=np.int64)
    rate, seconds = np.full(len(table), np.inf), np.zeros(len(table))
    for count, step in dims:
        size = size * count
        crossed = _crossed(count * step, count, table.world, cluster)
        sites = np.maximum(sites, 1 + crossed.sum(axis=0))
        for link, row in zip(site_links(cluster), crossed, strict=True):
            if link is not None:
                rate = np.where(row, np.minimum(rate, link.achieved), rate)
                seconds = np.where(row, np.maximum(seconds, link.latency_seconds), seconds)
    runs = _runs(dims)
    most, fewest, nodes = _spread(runs, room=group.devices_per_node, size=size, world=table.world)
    wide = (most, fewest, nodes)
    if group.rack_nodes:
        wide = _spread(runs, room=group.devices_per_node * group.rack_nodes, size=size, world=table.world)
    figures = [values.astype(np.float64) for values in (size, most, fewest, nodes, *wide, np.minimum(sites, size))]
    names = ("size", "per_node", "fewest", "nodes", "per_rack", "fewest_rack", "racks", "sites")
    return Ring(
        **dict(zip(names, figures, strict=True)),
        site_rate=rate,
        site_seconds=seconds,
        rivals=table.world / size,
        crossing=_crossing(runs, most, group=group, world=table.world),
    )


def _crossing(runs: Sequence[Dim], most: IntArray, *, group: NodeGroup, world: IntArray) -> FloatArray:
    """How many groups of a node, each of at the `most` so many ranks there, lie in both halves of it."""
    half = group.devices_per_node // 2
    if group.inside.across_sockets is None or half < 2:
        return np.zeros(len(most))
    in_half, _, _ = _spread(runs, room=half, size=most, world=world)
    beside = np.minimum(group.devices_per_node, world) / most
    return np.where(most > in_half, np.maximum(beside, 1.0), 0.0)


def _runs(dims: Sequence[Dim]) -> list[Dim]:
    """`dims` from the innermost outwards, those joined that continue each other; dims of one rank are left out."""
    counts = np.stack([count for count, _ in dims])
    steps = np.where(counts > 1, np.stack([step for _, step in dims]), _FAR)
    order = np.argsort(steps, axis=0)
    counts, steps = np.take_along_axis(counts, order, axis=0), np.take_along_axis(steps, order, axis=0)
    for inner in range(len(dims) - 1):
        joined = (counts[inner] > 1) & (steps[inner + 1] == counts[inner] * steps[inner])
        counts[inner + 1] = np.where(joined, counts[inner + 1] * counts[inner], counts[inner + 1])
        steps[inner + 1] = np.where(joined, steps[inner], steps[inner + 1])
        counts[inner] = np.where(joined, 1, counts[inner])
    return [(counts[index], np.where(counts[index] > 1, steps[index], 1)) for index in range(len(dims))]


def _spread(runs: Sequence[Dim], *, room: int, size: IntArray, world: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The most ranks of a group in one box of `room` devices, the fewest, and the most boxes that a group touches."""
    most, fewest, boxes = (np.ones_like(size) for _ in range(3))
    for count, step in runs:
        if not (count > 1).any():
            continue
        held, least, touched = _straddle(count, step, room=room, world=world)
        most, fewest, boxes = most * held, fewest * least, boxes * touched
    return most, np.where(boxes > 1, fewest, size), boxes


def _straddle(count: IntArray, step: IntArray, *, room: int, world: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """`_spread` of one run: groups begin at every multiple of its length, and at the `step` devices after each."""
    span = count * step
    turns = np.minimum(np.maximum(world // span, 1), room // np.gcd(span, room))
    turn = np.arange(int(turns.max(initial=1)), dtype=np.int64)
    turn = np.minimum(turn[:, None], turns - 1)
    near = np.minimum(step, room)
    held, least, touched = np.minimum(count, -(-room // near)), count, np.ones_like(count)
    for shift in (0, step - 1):
        first = (turn * span + shift) % room
        last = first + (count - 1) * step
        boxes = last // room + 1
        head = np.minimum(count, (room - first + near - 1) // near)
        ends = np.minimum(head, np.minimum(count, last % room // near + 1))
        ends = np.where(boxes > 2, np.minimum(ends, room // near), ends)
        least = np.minimum(least, np.where(boxes > 1, ends, count).min(axis=0))
        touched = np.maximum(touched, boxes.max(axis=0))
    apart = step >= room
    return np.where(apart, 1, held), np.where(apart, 1, least), np.where(apart, count, touched)


def site_edges(cluster: ClusterSpec) -> IntArray:
    """The first device of every site but the first."""
    starts = [0, *accumulate(group.num_devices for group in cluster.groups)]
    groups = cluster.groups
    edges = [starts[i] for i in range(1, len(groups)) if groups[i].site != groups[i - 1].site]
    return np.asarray(edges, dtype=np.int64)


def site_links(cluster: ClusterSpec) -> tuple[Link | None, ...]:
    """What the sites before and behind each of `site_edges` meet over; None where that is not known."""
    names = [group.site for group in cluster.groups]
    return tuple(cluster.between(one, other) for one, other in pairwise(names) if one != other)


def _crossed(span: IntArray, size: IntArray, world: IntArray, cluster: ClusterSpec) -> BoolArray:
    """(edges, rows): which of `site_edges` lie inside a block of `span` neighbouring devices; none of one rank."""
    edges = site_edges(cluster)[:, None]
    return np.asarray((size > 1) & (edges < world) & (edges % np.maximum(span, 1) != 0), dtype=np.bool_)


def crossings(
    table: PlanTable, rank: IntArray, *, group: NodeGroup, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Edges of nodes, or of racks where nodes are in some, and of sites between pipeline rank 0 and each of `rank`.

    Both are of its shape (rows, ranks).
    """
    device = rank * strides(table)[AxisName.PIPELINE][:, None]
    room = group.devices_per_node * (group.rack_nodes if group.rack and group.rack_nodes else 1)
    nodes = np.minimum(rank, device // room)
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
