from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog.node_links import pcie
from meshwright.cost import PlanTable
from meshwright.cost.network import collective, hand_on, occupied, send, send_inside
from meshwright.cost.placement import ring, strides
from meshwright.spec.cluster import Collective, CollectiveFit, DeviceKind, Link
from meshwright.spec.plan import AxisName
from tests.cost.cost_examples import even_layout, processor, selene, with_group

LAYOUTS = [even_layout(layers=4, pipeline=1)]


def lay(cluster, *axes, **columns):
    table = PlanTable.build(columns, layouts=LAYOUTS)
    return ring(table, axes, group=cluster.groups[0], cluster=cluster)


def seconds(operation, cluster, *axes, num_bytes=1e11, **columns):
    linear = collective(operation, lay(cluster, *axes, **columns), group=cluster.groups[0], cluster=cluster)
    return linear.seconds(num_bytes)


def test_groups_lie_where_their_axis_puts_them():
    cluster = selene(nodes=8)
    table = PlanTable.build({"tensor": 4, "shard": 2, "replicate": 8}, layouts=LAYOUTS)
    assert {name: int(step[0]) for name, step in strides(table).items()} == {
        AxisName.TENSOR: 1,
        AxisName.CONTEXT: 4,
        AxisName.SHARD: 4,
        AxisName.REPLICATE: 8,
        AxisName.PIPELINE: 64,
    }
    both = lay(cluster, AxisName.REPLICATE, AxisName.SHARD, tensor=4, shard=2, replicate=8)
    assert (both.size[0], both.per_node[0], both.nodes[0]) == (16.0, 2.0, 8.0)
    inside = lay(cluster, AxisName.TENSOR, tensor=4, shard=2, replicate=8)
    assert (inside.per_node[0], inside.nodes[0]) == (4.0, 1.0)


def test_an_odd_group_straddles_nodes():
    found = lay(selene(nodes=3), AxisName.TENSOR, tensor=3, replicate=8)
    assert found.nodes[0] == 2.0


def test_ranks_of_a_node_share_its_adapters():
    cluster = selene(nodes=8)
    wide = seconds(Collective.ALL_REDUCE, cluster, AxisName.REPLICATE, replicate=64)
    narrow = seconds(Collective.ALL_REDUCE, cluster, AxisName.REPLICATE, replicate=8, tensor=8)
    nic, inside = 25e9 * 0.8, 300e9 * 0.77
    assert wide[0] == pytest.approx(2 * 63 / 64 * 1e11 / min(8 * nic, inside), rel=0.02)
    assert narrow[0] == pytest.approx(2 * 7 / 8 * 1e11 / nic, rel=0.02)


def three_sites(**uplinks):
    """A node each, of which those in `uplinks` have one of so many bits/s, and the others 1 Gbit/s."""
    group = replace(selene(nodes=1).groups[0], num_nodes=1)
    wide = Link(bandwidth=1.25e8, latency_seconds=10e-3, efficiency=1.0)
    return replace(
        selene(nodes=1),
        groups=tuple(replace(group, name=name, site=name) for name in ("a", "b", "c")),
        wide_area=wide,
        uplinks={site: replace(wide, bandwidth=bits / 8, latency_seconds=30e-3) for site, bits in uplinks.items()},
    )


@pytest.mark.parametrize("operation", [Collective.ALL_REDUCE, Collective.ALL_TO_ALL])
def test_the_slowest_of_the_sites_that_are_crossed_decides(operation):
    plain, uneven = three_sites(), three_sites(c=1e8)
    slow = replace(plain, wide_area=replace(plain.wide_area, bandwidth=1.25e7, latency_seconds=20e-3))
    for ranks, alike in ((16, plain), (24, slow)):
        found, wanted = (
            seconds(operation, cluster, AxisName.REPLICATE, num_bytes=1e9, replicate=ranks)[0]
            for cluster in (uneven, alike)
        )
        assert found == pytest.approx(wanted)
    assert uneven.between("a", "c") == uneven.between("c", "a")
    faster = three_sites(c=1e10)
    assert seconds(operation, faster, AxisName.REPLICATE, num_bytes=1e9, replicate=24)[0] == pytest.approx(
        seconds(operation, plain, AxisName.REPLICATE, num_bytes=1e9, replicate=24)[0], rel=0.02
    )


@given(size=st.sampled_from([2, 4, 8, 16, 64]), operation=st.sampled_from(list(Collective)[:3]))
def test_an_all_reduce_is_a_scatter_and_a_gather(size, operation):
    cluster = selene(nodes=8)
    columns = {"replicate": size}
    whole = seconds(Collective.ALL_REDUCE, cluster, AxisName.REPLICATE, **columns)
    parts = seconds(Collective.REDUCE_SCATTER, cluster, AxisName.REPLICATE, **columns)
    parts = parts + seconds(Collective.ALL_GATHER, cluster, AxisName.REPLICATE, **columns)
    assert whole[0] == pytest.approx(parts[0], rel=0.02)
    assert seconds(operation, cluster, AxisName.TENSOR, **columns)[0] == 0.0


def test_measured_times_come_first_and_are_interpolated_over_ranks():
    cluster = processor(ranks=8, cores=2)
    found = [
        float(seconds(Collective.ALL_REDUCE, cluster, AxisName.REPLICATE, num_bytes=1e6, replicate=size)[0])
        for size in (2, 3, 4)
    ]
    assert found[0] == pytest.approx(2e-4 + 1e6 / 1e9)
    assert found[2] == pytest.approx(4e-4 + 1e6 / 0.5e9)
    assert found[0] < found[1] < found[2]


def test_a_rack_is_faster_than_the_network_beyond_it():
    plain = selene(nodes=8)
    racked = with_group(plain, rack_nodes=4, rack=Link(bandwidth=300e9, latency_seconds=2e-6))
    near = [float(seconds(Collective.ALL_REDUCE, c, AxisName.REPLICATE, replicate=32)[0]) for c in (plain, racked)]
    far = [float(seconds(Collective.ALL_REDUCE, c, AxisName.REPLICATE, replicate=64)[0]) for c in (plain, racked)]
    assert near[1] < near[0]
    assert near[1] < far[1] <= far[0]


def test_without_a_switch_a_few_ranks_have_a_few_of_the_links():
    """64 GB/s each way between two MI300X, 192 among four, 448 among all eight."""
    mesh = Link(bandwidth=448e9, latency_seconds=0.0, efficiency=1.0, peers=7)
    plain, meshed = (with_group(selene(nodes=1), inside=link) for link in (replace(mesh, peers=None), mesh))
    for ranks, rate in ((2, 64.0), (4, 192.0), (8, 448.0)):
        one, other = (
            seconds(Collective.ALL_GATHER, c, AxisName.TENSOR, tensor=ranks, num_bytes=1e12)[0] for c in (plain, meshed)
        )
        assert other / one == pytest.approx(448.0 / rate, rel=1e-4)
    exchanged = [
        seconds(Collective.ALL_TO_ALL, meshed, AxisName.TENSOR, tensor=ranks, num_bytes=1e12)[0] for ranks in (4, 8)
    ]
    assert exchanged[0] == pytest.approx(2.0 * exchanged[1], rel=1e-4)  # each sends every peer a part of 1/n at 64 GB/s
    assert send(mesh, senders=np.ones(1), adapters=8.0).seconds(64e9)[0] == pytest.approx(1.0)


def test_sites_share_one_link():
    first = selene(nodes=1).groups[0]
    groups = (replace(first, site="east"), replace(first, name="west", site="west"))
    link = Link(bandwidth=1e9, latency_seconds=0.02, efficiency=1.0)
    cluster = replace(selene(nodes=1), groups=groups, wide_area=link)
    one = seconds(Collective.ALL_REDUCE, cluster, AxisName.REPLICATE, replicate=16)
    eight = seconds(Collective.ALL_REDUCE, cluster, AxisName.REPLICATE, replicate=2, tensor=8)
    assert eight[0] > 7.0 * one[0] > 6.5
    inside = lay(cluster, AxisName.TENSOR, replicate=2, tensor=8)
    assert inside.sites[0] == 1.0


def test_a_ring_crosses_between_sites_with_all_that_a_rank_does_not_hold():
    first = selene(nodes=1).groups[0]
    link = Link(bandwidth=1e6, latency_seconds=1e-3, efficiency=1.0)

    def over(kind: DeviceKind, operation: Collective) -> float:
        like = replace(first, device=replace(first.device, kind=kind))
        groups = (replace(like, site="east"), replace(like, name="west", site="west"))
        cluster = replace(selene(nodes=1), groups=groups, wide_area=link)
        return float(seconds(operation, cluster, AxisName.REPLICATE, replicate=16, num_bytes=1e9)[0])

    assert over(DeviceKind.CPU, Collective.ALL_REDUCE) == pytest.approx(1000.0 * 2 * 15 / 16, rel=0.01)
    assert over(DeviceKind.CPU, Collective.ALL_GATHER) == pytest.approx(1000.0 * 15 / 16, rel=0.01)
    assert over(DeviceKind.CUDA, Collective.ALL_GATHER) == pytest.approx(1000.0 * 15 / 16, rel=0.01)
    assert over(DeviceKind.CUDA, Collective.ALL_REDUCE) == pytest.approx(1000.0, rel=0.01)  # trees: all, each way


def test_senders_of_a_node_share_its_adapters():
    link = Link(bandwidth=10e9, latency_seconds=1e-5, efficiency=1.0)
    alone, together = (send(link, senders=np.array([count]), adapters=2.0).seconds(1e9)[0] for count in (1.0, 8.0))
    assert alone == pytest.approx(0.1 + 1e-5)
    assert together == pytest.approx(0.4 + 1e-5)


def test_a_hop_takes_what_all_ranks_of_a_ring_took_at_once():
    """Between measured numbers of ranks by their logarithm, beyond them as the nearest; else as one message alone."""
    fits = [
        CollectiveFit(operation=operation, ranks=ranks, latency_seconds=latency, bytes_per_second=2e9)
        for operation, ranks, latency in (
            (Collective.SEND, 2, 1e-4),
            (Collective.PASS, 2, 2e-4),
            (Collective.PASS, 8, 8e-4),
        )
    ]
    link = Link(bandwidth=1e9, latency_seconds=1e-5, fits=tuple(fits))
    ranks = np.array([2.0, 4.0, 8.0, 16.0])
    hop, measured = hand_on(link, ranks=ranks, senders=np.ones(4), adapters=1.0)
    assert measured
    assert hop.seconds(0.0) == pytest.approx([2e-4, 4e-4, 8e-4, 8e-4])
    alone, measured = hand_on(replace(link, fits=tuple(fits[:1])), ranks=ranks, senders=np.ones(4), adapters=1.0)
    assert not measured
    assert alone.seconds(2e9) == pytest.approx(1.0001)


def test_hops_between_processes_of_a_node_hide_behind_nothing():
    """Their cores carry them; between nodes they wait, and work goes on."""
    cluster = processor(ranks=4, cores=2)
    around = lay(cluster, AxisName.CONTEXT, context=2)
    kind = cluster.groups[0].device.kind
    assert occupied(around, kind=kind) == 1.0
    assert occupied(replace(around, racks=np.full_like(around.racks, 2.0)), kind=kind) == 0.0


def on_sockets(nodes=1):
    """Eight devices a node on PCI Express: SimuMax measured 20.8, 7.65, 4 and 13.5 GB/s of bus for groups of four side
    by side, of four and of two that lie in both halves, and of all eight."""
    return with_group(selene(nodes=nodes), inside=pcie(generation=4))


@pytest.mark.parametrize(
    ("columns", "ranks", "measured"),
    [
        ({"tensor": 2, "replicate": 4}, 4, 7.65e9),
        ({"tensor": 4, "replicate": 2}, 2, 4e9),
        ({"replicate": 8}, 8, 13.5e9),
    ],
)
def test_groups_that_cross_sockets_share_what_joins_them(columns, ranks, measured):
    found = seconds(Collective.ALL_GATHER, on_sockets(), AxisName.REPLICATE, **columns)
    assert found[0] == pytest.approx((ranks - 1) / ranks * 1e11 / measured, rel=0.15)


def test_groups_in_one_half_have_their_lanes():
    found = seconds(Collective.ALL_GATHER, on_sockets(), AxisName.TENSOR, tensor=4, replicate=2)
    assert found[0] == pytest.approx(3 / 4 * 1e11 / 20.8e9, rel=0.01)
    all_eight = seconds(Collective.ALL_TO_ALL, on_sockets(), AxisName.REPLICATE, replicate=8)
    assert all_eight[0] == pytest.approx(4 * 4 / 8 * 1e11 / (0.48 * 31.5e9), rel=0.01)


@pytest.mark.parametrize(("senders", "share"), [(1.0, 1.0), (2.0, 2.0), (8.0, 4.0)])
def test_messages_to_the_other_half_share_its_link(senders, share):
    group = on_sockets().groups[0]
    found = send_inside(group, senders=np.array([senders]))
    assert found.per_byte[0, 0] == pytest.approx(share / (0.48 * 31.5e9))
