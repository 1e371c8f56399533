"""Which algorithm is quickest, and what every one of them moves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.cost import PlanTable, evaluate
from meshwright.cost.lines import Linear, quickest
from meshwright.cost.network import collective, occupied, routes
from meshwright.cost.placement import lay
from meshwright.spec.cluster import Collective, DeviceKind, Link
from tests.cost.cost_examples import JOB, even_layout, gpt, selene, with_group

LAYOUTS = [even_layout(layers=4, pipeline=1)]
GROUPED = [operation for operation in Collective if operation is not Collective.SEND]


def around(cluster, *dims):
    world = cluster.num_devices
    table = PlanTable.build({"replicate": world}, layouts=LAYOUTS)
    arrays = [(np.array([count]), np.array([step])) for count, step in dims]
    return lay(table, arrays, group=cluster.groups[0], cluster=cluster)


def priced(operation, cluster, *dims):
    return collective(operation, around(cluster, *dims), group=cluster.groups[0], cluster=cluster)


def racked(*, nodes, rack_nodes):
    """Nodes of four on links of 900 GB/s that reach through a rack, one adapter of 50 GB/s a device."""
    fast = Link(bandwidth=900e9, latency_seconds=3e-6, efficiency=0.75)
    nic = Link(bandwidth=50e9, latency_seconds=14e-6, efficiency=0.7)
    return with_group(
        selene(nodes=nodes), devices_per_node=4, inside=fast, rack=fast, rack_nodes=rack_nodes, nic=nic, nics=4
    )


SHAPES = st.sampled_from([(2, 1), (8, 1), (16, 1), (64, 1), (8, 8), (4, 16), (12, 1), (3, 2), (32, 2)])


@given(operation=st.sampled_from(GROUPED), dims=SHAPES, num_bytes=st.sampled_from([0.0, 1e3, 1e6, 1e9]))
def test_no_algorithm_is_quicker_than_the_price(operation, dims, num_bytes):
    cluster = selene(nodes=12)
    price = priced(operation, cluster, dims).seconds(num_bytes)[0]
    each = {
        name: line.seconds(num_bytes)[0]
        for name, line in routes(operation, around(cluster, dims), group=cluster.groups[0]).items()
    }
    least = min(each.values())
    assert price >= least * (1 - 1e-12)
    assert price <= 1.1 * least
    if operation is not Collective.ALL_TO_ALL:
        assert price <= 1.1 * each["ring/simple"]


@given(
    operation=st.sampled_from(GROUPED),
    dims=SHAPES,
    tier=st.sampled_from(["inside", "nic", "rack"]),
    num_bytes=st.floats(1.0, 1e10),
)
def test_a_faster_link_is_never_slower(operation, dims, tier, num_bytes):
    cluster = racked(nodes=32, rack_nodes=8)
    link = getattr(cluster.groups[0], tier)
    before = priced(operation, cluster, dims).seconds(num_bytes)[0]
    for better in (
        replace(link, bandwidth=2 * link.bandwidth),
        replace(link, latency_seconds=link.latency_seconds / 2),
    ):
        after = priced(operation, with_group(cluster, **{tier: better}), dims).seconds(num_bytes)[0]
        assert after <= before * (1 + 1e-12)
    crowded = priced(operation, with_group(cluster, nic=replace(cluster.groups[0].nic, oversubscription=4.0)), dims)
    assert crowded.seconds(num_bytes)[0] >= before * (1 - 1e-12)


def test_small_messages_take_the_quick_protocol_and_large_ones_the_wide_one():
    cluster = selene(nodes=4)
    ways = routes(Collective.ALL_REDUCE, around(cluster, (32, 1)), group=cluster.groups[0])

    def best(num_bytes):
        return min(ways, key=lambda name: ways[name].seconds(num_bytes)[0])

    assert best(1e3) == "tree/ll"
    assert best(1e10) == "ring/simple"


def test_a_tree_crosses_many_nodes_in_fewer_steps_than_a_ring():
    cluster = selene(nodes=256)
    reduce, gather = (
        priced(operation, cluster, (256, 8)).seconds(0.0)[0]
        for operation in (Collective.ALL_REDUCE, Collective.ALL_GATHER)
    )
    assert reduce < gather / 5


def test_all_to_all_sends_what_is_not_its_own():
    """Of S bytes a rank sends 1/n to each of n - 1: 7/64 inside, 56/64 over its adapter at 0.8 of a ring's rate."""
    cluster = selene(nodes=8)
    group = cluster.groups[0]
    per_byte = priced(Collective.ALL_TO_ALL, cluster, (64, 1)).per_byte[0][0]
    adapter, inside = (link.bandwidth * link.efficiency for link in (group.nic, group.inside))
    assert per_byte == pytest.approx(56 / 64 / (0.8 * adapter))
    assert priced(Collective.ALL_TO_ALL, cluster, (8, 1)).per_byte[0][0] == pytest.approx(7 / 8 / inside)
    halved = with_group(cluster, nics=4)
    assert priced(Collective.ALL_TO_ALL, halved, (64, 1)).per_byte[0][0] == pytest.approx(2 * per_byte)


def test_a_group_over_two_racks_uses_all_adapters_of_each():
    """64 ranks on two racks of 72: 28 adapters of the emptier one carry more than a device's own links do."""
    cluster = racked(nodes=32, rack_nodes=18)
    inside = 900e9 * 0.75
    assert priced(Collective.ALL_GATHER, cluster, (64, 2)).seconds(1e12)[0] == pytest.approx(
        63 / 64 * 1e12 / inside, rel=0.01
    )
    one = with_group(cluster, rack=None, rack_nodes=None)
    assert priced(Collective.ALL_GATHER, one, (64, 2)).seconds(1e12)[0] == pytest.approx(
        63 / 64 * 1e12 / (2 * 50e9 * 0.7), rel=0.01
    )


def test_a_group_that_straddles_has_the_adapters_of_its_smaller_part():
    """Twelve ranks on nodes of eight: eight in one, four in the next, and four adapters between them."""
    cluster = selene(nodes=3)
    adapter = 25e9 * 0.8
    assert priced(Collective.ALL_GATHER, cluster, (12, 1)).seconds(1e12)[0] == pytest.approx(
        11 / 12 * 1e12 / (4 * adapter), rel=0.01
    )


def test_stages_carry_less_between_two_nodes_than_a_ring_does():
    """A ring carries 15/16 of the tensor between two nodes of eight, stages a half; both use all adapters."""
    cluster = selene(nodes=2)
    staged = with_group(
        cluster, nic=replace(cluster.groups[0].nic, staged=True), inside=Link(bandwidth=1e15, latency_seconds=1e-6)
    )
    assert any(
        name.startswith("staged")
        for name in routes(Collective.ALL_GATHER, around(staged, (16, 1)), group=staged.groups[0])
    )
    flat, stages = (priced(Collective.ALL_GATHER, c, (16, 1)).seconds(1e12)[0] for c in (cluster, staged))
    assert stages / flat == pytest.approx(8 / 15, rel=0.01)


@given(operation=st.sampled_from(GROUPED), dims=SHAPES, num_bytes=st.floats(1.0, 1e11))
def test_leave_to_stage_is_never_slower(operation, dims, num_bytes):
    cluster = selene(nodes=12)
    staged = with_group(cluster, nic=replace(cluster.groups[0].nic, staged=True))
    plain, free = (priced(operation, c, dims).seconds(num_bytes)[0] for c in (cluster, staged))
    assert free <= 1.1 * plain


def test_a_switch_that_adds_saves_one_of_two_passes():
    plain = selene(nodes=1)
    inside = plain.groups[0].inside
    adding = with_group(plain, inside=replace(inside, sums=1.0))
    ring, added = (priced(Collective.ALL_REDUCE, c, (8, 1)).seconds(1e12)[0] for c in (plain, adding))
    assert added / ring == pytest.approx((1 + 1 / 8) / (2 * 7 / 8), rel=0.01)
    assert "sums" not in routes(Collective.ALL_GATHER, around(adding, (8, 1)), group=adding.groups[0])


def test_the_switch_of_a_real_board_gives_what_was_measured_on_it():
    """All-reduce among 8 H100: NCCL measured 444 GB/s of bus, the formula without that fit comes within 3 %."""
    cluster = catalog.load_cluster("dgx-h100")
    group = cluster.groups[0]
    bare = with_group(cluster, inside=replace(group.inside, fits=()))
    formula, fitted = (priced(Collective.ALL_REDUCE, c, (8, 1)).seconds(1e12)[0] for c in (bare, cluster))
    assert formula == pytest.approx(fitted, rel=0.03)


def test_fewer_ranks_than_were_measured_keep_the_formulas_shape():
    """Among two ranks an all-reduce moves each byte once, among eight 7/4 times: measured speed carries over."""
    cluster = catalog.load_cluster("dgx-a100")
    two, eight = (priced(Collective.ALL_REDUCE, cluster, (size, 1)).seconds(1e12)[0] for size in (2, 8))
    assert two / eight == pytest.approx(1.0 / 1.75, rel=0.01)


lines = st.lists(st.tuples(st.floats(0, 1e-2), st.floats(1e-13, 1e-8)), min_size=1, max_size=9)


@given(lines=lines, num_bytes=st.floats(0.0, 1e12))
def test_the_quickest_lines_are_lines_and_right_at_both_ends(lines, num_bytes):
    several = [Linear.line(np.array([latency]), np.array([per_byte])) for latency, per_byte in lines]
    found = quickest(several)
    assert len(found.latency) <= 3
    least = min(entry.seconds(num_bytes)[0] for entry in several)
    assert found.seconds(num_bytes)[0] >= least * (1 - 1e-9)
    assert found.seconds(0.0)[0] == min(latency for latency, _ in lines)
    assert found.seconds(1e18)[0] == pytest.approx(min(entry.seconds(1e18)[0] for entry in several), rel=1e-6)


def test_seconds_of_many_ranks_are_those_of_each():
    found = Linear(latency=np.array([[1.0, 2.0], [0.1, 0.2]]), per_byte=np.array([[0.1, 0.1], [1.0, 1.0]]))
    num_bytes = np.array([[0.0, 1.0, 50.0], [3.0, 4.0, 5.0]])
    table = found.seconds(num_bytes)
    for column in range(3):
        assert table[:, column] == pytest.approx(found.seconds(num_bytes[:, column]))
    assert found.take(np.array([1, 1, 0])).seconds(10.0) == pytest.approx(found.seconds(10.0)[[1, 1, 0]])


def test_carrying_takes_processors_of_gpus_alone():
    cluster = selene(nodes=2)
    near, far = around(cluster, (8, 1)), around(cluster, (16, 1))
    assert occupied(near, kind=DeviceKind.CUDA)[0] > occupied(far, kind=DeviceKind.CUDA)[0] > 0.0
    assert occupied(near, kind=DeviceKind.TPU)[0] == 0.0


@given(nodes=st.permutations(range(4)))
def test_equal_nodes_may_change_places(nodes):
    first = selene(nodes=1).groups[0]
    groups = tuple(replace(first, name=f"node-{index}") for index in nodes)
    cluster = replace(selene(nodes=1), groups=groups)
    usual = selene(nodes=4)
    for dims in ((16, 1), (4, 8)):
        assert priced(Collective.ALL_REDUCE, cluster, dims).seconds(1e9) == pytest.approx(
            priced(Collective.ALL_REDUCE, usual, dims).seconds(1e9)
        )


def test_the_slower_island_decides_what_both_take_part_in():
    fast = selene(nodes=2)
    slow = with_group(fast, nic=replace(fast.groups[0].nic, bandwidth=5e9), name="slow")
    mixed = replace(fast, groups=(fast.groups[0], slow.groups[0]))
    table = PlanTable.build({"tensor": 8, "replicate": 4, "microbatches": 16}, layouts=LAYOUTS)
    model = gpt(width=1024, layers=4, heads=16, vocab=1024)
    uniform = [replace(c, groups=(replace(c.groups[0], num_nodes=4),)) for c in (fast, slow)]
    seconds = [evaluate(table, model=model, cluster=c, job=JOB).step_seconds[0] for c in (*uniform, mixed)]
    assert seconds[0] < seconds[1] == pytest.approx(seconds[2])
