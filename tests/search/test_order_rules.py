"""Orders of axes whose cost is said to be known: where their ranks lie is what placing every rank by hand gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from meshwright.cost import Layout, PlanTable
from meshwright.cost.placement import crossings, ring, strides
from meshwright.cost.table import DEFAULT_ORDER
from meshwright.search.orders import evenly
from meshwright.spec.plan import AxisName
from tests.search import search_samples as samples

SIZES = {
    (2, 4): [(2, 1, 1, 2, 2), (2, 2, 2, 1, 1), (4, 1, 2, 1, 1), (1, 2, 1, 2, 2)],
    (2, 6): [(3, 1, 2, 1, 2), (3, 2, 2, 1, 1), (2, 1, 3, 1, 2), (6, 1, 2, 1, 1)],
    (3, 4): [(3, 1, 4, 1, 1), (3, 2, 1, 1, 2), (2, 1, 6, 1, 1)],
}
CASES = [(nodes, room, sizes) for (nodes, room), found in SIZES.items() for sizes in found]
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


def table(sizes: tuple[int, ...], order: tuple[AxisName, ...]) -> PlanTable:
    columns = dict(zip(AXES, sizes, strict=True))
    return PlanTable.build(columns, layouts=(Layout((0, 1), (0,)),), orders=(order,))


def places(sizes: tuple[int, ...], order: tuple[AxisName, ...]) -> Iterator[dict[AxisName, int]]:
    """The coordinates of every device in turn."""
    size = dict(zip(DEFAULT_ORDER, sizes, strict=True))
    for at in product(*(range(size[name]) for name in order)):
        yield dict(zip(order, at, strict=True))


def rest(place: dict[AxisName, int], name: AxisName) -> tuple[tuple[AxisName, int], ...]:
    return tuple(sorted((axis, at) for axis, at in place.items() if axis is not name))


@pytest.mark.parametrize(("nodes", "room", "sizes"), CASES)
def test_where_ranks_lie_is_known_in_every_order_that_is_legal(nodes: int, room: int, sizes: tuple[int, ...]) -> None:
    cluster = samples.cluster(samples.nodes(num_nodes=nodes, devices_per_node=room))
    group, legal = cluster.groups[0], 0
    for order in permutations(DEFAULT_ORDER):
        one = table(sizes, order)
        if not evenly(one, cluster=cluster)[0]:
            continue
        legal += 1
        where = list(places(sizes, order))
        for name in DEFAULT_ORDER:
            held: dict[object, Counter[int]] = {}
            for device, place in enumerate(where):
                held.setdefault(rest(place, name), Counter())[device // room] += 1
            found = ring(one, (name,), group=group, cluster=cluster)
            assert {len(counts) for counts in held.values()} == {int(found.nodes[0])}
            assert {count for counts in held.values() for count in counts.values()} == {int(found.per_node[0])}
        check_hops(one, where, room=room, nodes=crossings(one, RANKS[:, : sizes[0]], group=group, cluster=cluster)[0])
    assert legal > 1


RANKS = np.arange(16)[None]


def check_hops(one: PlanTable, where: list[dict[AxisName, int]], *, room: int, nodes: np.ndarray) -> None:
    """Every pipeline leaves its node at the same ranks, and as many ranks of a node do so at once."""
    device_of = {tuple(sorted(place.items())): device for device, place in enumerate(where)}
    for at in range(int(one.pipeline[0]) - 1):
        senders: Counter[int] = Counter()
        crossed = set()
        for device, place in enumerate(where):
            if place[AxisName.PIPELINE] == at:
                after = device_of[tuple(sorted((place | {AxisName.PIPELINE: at + 1}).items()))]
                crossed.add(after // room != device // room)
                senders[device // room] += after // room != device // room
        assert crossed == {bool(np.diff(nodes[0])[at])}
        if crossed == {True}:
            assert max(senders.values()) == min(room, int(strides(one)[AxisName.PIPELINE][0]))


def test_an_axis_that_straddles_nodes_is_not_said_to_be_known() -> None:
    cluster = samples.cluster(samples.nodes(num_nodes=2, devices_per_node=6))
    order = (AxisName.SHARD, AxisName.PIPELINE, AxisName.REPLICATE, AxisName.CONTEXT, AxisName.TENSOR)
    assert evenly(table((3, 1, 2, 1, 2), order), cluster=cluster)[0]
    assert not evenly(table((3, 1, 1, 1, 4), order), cluster=cluster)[0]
    unlike = replace(cluster, groups=(*cluster.groups, samples.nodes(devices_per_node=4)))
    assert not evenly(table((3, 1, 2, 1, 2), order), cluster=unlike)[0]
