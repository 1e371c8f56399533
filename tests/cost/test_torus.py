"""Groups on a torus, held against every message sent hop by hop."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from meshwright.catalog.nodes import group_of
from meshwright.cost.network import collective, send
from meshwright.cost.placement import Ring
from meshwright.cost.torus import lie, torus_sides
from meshwright.spec.cluster import ClusterSpec, Collective, NodeGroup


def ring(group: NodeGroup, size: int) -> Ring:
    one = np.ones(1)
    per_node = one * min(size, group.devices_per_node)
    nodes = np.ceil(size / per_node)
    apart = {"racks": one, "sites": one, "rivals": one, "crossing": 0.0 * one}
    apart |= {"site_rate": np.inf * one, "site_seconds": 0.0 * one}
    within = {"per_rack": one * size, "fewest_rack": one * size}
    return Ring(size=one * size, per_node=per_node, fewest=per_node, nodes=nodes, **within, **apart)


def seconds(group: NodeGroup, size: int, operation: Collective, num_bytes: float) -> float:
    cluster = ClusterSpec(name="pod", groups=(group,))
    return float(
        collective(operation, ring(group, size), group=group, cluster=cluster).seconds(np.array([num_bytes]))[0]
    )


def heaviest(sides: tuple[int, ...], *, joined: bool) -> float:
    """The most messages over one link each way where every device sends one to every other, side after side."""
    loads: Counter[tuple[tuple[int, ...], int, int]] = Counter()
    places = list(product(*(range(side) for side in sides)))
    for start, end in product(places, places):
        at = list(start)
        for dim, side in enumerate(sides):
            ahead, back = (end[dim] - at[dim]) % side, (at[dim] - end[dim]) % side
            ways = (
                [(1, ahead, 1.0)]
                if ahead < back
                else [(-1, back, 1.0)]
                if back < ahead
                else [(1, ahead, 0.5), (-1, back, 0.5)]
            )
            if not joined:
                ways = [(1 if end[dim] > at[dim] else -1, abs(end[dim] - at[dim]), 1.0)]
            for way, hops, share in ways:
                here = list(at)
                for _ in range(hops):
                    loads[tuple(here), dim, way] += share
                    here[dim] = (here[dim] + way) % side
            at[dim] = end[dim]
    return max(loads.values())


@pytest.mark.parametrize(
    ("device", "nodes", "joined"),
    [("TPU-v4", 16, True), ("TPU-v5p", 16, True), ("TPU-v5e", 8, False), ("TPU-v5e", 2, False)],
)
def test_all_to_alls_take_what_the_busiest_link_carries(device, nodes, joined):
    group = group_of(device, nodes_count=nodes)
    world, link = group.num_devices, group.inside
    sides = torus_sides(world, link.torus)
    share = lie(link, np.array([float(world)]), devices=world).scattered[0]
    one_link = 1.0 / (2.0 * link.torus)
    assert world / share == pytest.approx(heaviest(sides, joined=joined) / one_link)


@pytest.mark.parametrize(
    ("device", "nodes", "shares"),
    [
        ("TPU-v4", 16, {2: 1 / 6, 4: 2 / 6, 16: 4 / 6, 64: 1.0}),  # 4 x 4 x 4, every side a ring
        ("TPU-v5e", 32, {4: 1 / 4, 16: 2 / 4, 256: 1.0}),  # 16 x 16: four of a side are a line
        ("TPU-v6e", 4, {4: 1 / 4, 32: 2 / 4}),  # 4 x 8: two lines
    ],
)
def test_a_group_has_the_links_of_the_sides_it_lies_along(device, nodes, shares):
    group = group_of(device, nodes_count=nodes)
    found = {size: lie(group.inside, np.array([float(size)]), devices=group.num_devices).rings[0] for size in shares}
    assert found == pytest.approx(shares)
    sent = 1e9
    for size, share in shares.items():
        whole = sent * (size - 1) / size / (share * group.inside.bandwidth * group.inside.efficiency)
        assert seconds(group, size, Collective.ALL_GATHER, sent) == pytest.approx(whole, rel=0.01)


def test_a_step_is_a_hop_along_all_sides_at_once():
    group = group_of("TPU-v5p", nodes_count=1024)
    assert seconds(group, 4096, Collective.ALL_GATHER, 1.0) < 30e-6


def test_a_message_to_the_next_device_has_one_link():
    link = group_of("TPU-v5p", nodes_count=16).inside
    priced = send(link, senders=np.ones(1), adapters=4.0)
    assert float(priced.per_byte[0, 0]) == pytest.approx(6.0 / (link.bandwidth * link.efficiency))


def test_sides_are_as_even_as_can_be():
    found = [torus_sides(*case) for case in ((64, 3), (128, 3), (6144, 3), (32, 2), (256, 2), (7, 2))]
    assert found == [(4, 4, 4), (4, 4, 8), (16, 16, 24), (4, 8), (16, 16), (1, 7)]
