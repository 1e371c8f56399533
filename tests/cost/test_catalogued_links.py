"""What holds of collectives and messages on every kind of node of the catalog, whatever was measured of it."""

import math

import numpy as np
import pytest

from meshwright.catalog.nodes import group_of, nodes
from meshwright.cost import PlanTable
from meshwright.cost.network import collective, send_inside
from meshwright.cost.placement import lay
from meshwright.spec.cluster import ClusterSpec, Collective
from tests.cost.cost_examples import even_layout

LAYOUTS = [even_layout(layers=4, pipeline=1)]
ALL = {name: group_of(name, nodes_count=1, name="node") for name in sorted(nodes())}
ALIKE = {repr((group.inside, group.nic, group.rack, group.device.kind)): name for name, group in ALL.items()}
KINDS = sorted(ALIKE.values())  # one of those with the same links
GIB = 2.0**30
PAIRS = {
    "V100-32GB": 50e9,
    "V100-16GB": 50e9,
    "P100": 20e9,
    "MI300X": 64e9,
    "MI325X": 64e9,
    "MI350X": 76.8e9,
    "MI355X": 76.8e9,
    "MI300A": 128e9,
}  # bytes/s each way between the two best joined devices, where no switch joins them


def priced(operation, kind, ranks):
    """Of groups of so many neighbours, on as many nodes as they need."""
    per_node = ALL[kind].devices_per_node
    group = group_of(kind, nodes_count=math.ceil(ranks / per_node))
    cluster = ClusterSpec(name=kind, groups=(group,))
    table = PlanTable.build({"replicate": cluster.num_devices}, layouts=LAYOUTS)
    ring = lay(table, [(np.array([ranks]), np.array([1]))], group=group, cluster=cluster)
    return collective(operation, ring, group=group, cluster=cluster)


def counts(kind):
    """Numbers of ranks in a node, and of ranks on two and eight of them."""
    per_node = ALL[kind].devices_per_node
    return [*range(2, per_node + 1), 2 * per_node, 8 * per_node] if per_node > 1 else [2, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scatter_and_a_gather_take_about_as_long_as_an_all_reduce(kind):
    group = ALL[kind]
    for ranks in counts(kind):
        near = ranks <= group.devices_per_node
        if group.inside.sums is not None and (near or group.rack is not None):
            continue
        found = [
            priced(operation, kind, ranks)
            for operation in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        ]
        for num_bytes in (2.0**24, GIB) if near else (GIB,):
            whole, scatter, gather = (float(line.seconds(num_bytes)[0]) for line in found)
            assert 1.0 / 1.6 < (scatter + gather) / whole < 1.6, (ranks, num_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", [*Collective][:4])
def test_more_bytes_never_take_less(kind, operation):
    sizes = np.array([0.0, *(2.0 ** np.arange(10, 34))])
    for ranks in counts(kind):
        found = priced(operation, kind, ranks)
        taken = np.array([float(found.seconds(size)[0]) for size in sizes])
        assert np.all(np.diff(taken) >= 0.0), ranks
        assert taken[-1] > taken[0] > 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_no_faster_than_the_link_between_two_devices(kind):
    group = ALL[kind]
    link = group.inside
    rate = PAIRS.get(kind, link.bandwidth if link.torus is None else link.bandwidth / (2 * link.torus))
    assert (link.peers is not None) == (kind in PAIRS)
    for senders in (1.0, 2.0, float(group.devices_per_node)):
        taken = float(send_inside(group, senders=np.array([senders])).seconds(GIB)[0])
        assert taken > GIB / rate


@pytest.mark.parametrize(
    ("kind", "ranks", "rate"), [("V100-32GB", 2, 25e9), ("V100-32GB", 4, 100e9), ("P100", 2, 20e9)]
)
def test_a_few_ranks_of_a_cube_mesh_have_the_links_between_them(kind, ranks, rate):
    """One link between two neighbours of a DGX-1, four of six for each of four V100."""
    for operation in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        turns = 2.0 if operation is Collective.ALL_REDUCE else 1.0
        bus = turns * (ranks - 1) / ranks * GIB / float(priced(operation, kind, ranks).seconds(GIB)[0])
        assert 0.6 * rate < bus < rate


@pytest.mark.parametrize(("kind", "rate"), [("V100-16GB", 200e9), ("P100", 80e9)])
def test_half_of_what_eight_devices_trade_crosses_their_cube(kind, rate):
    taken = float(priced(Collective.ALL_TO_ALL, kind, 8).seconds(GIB)[0])
    assert 4 * GIB / 2 / rate < taken < 1.2 * 4 * GIB / 2 / rate
