"""Groups laid by formula against a brute force that puts every rank on its device."""

from dataclasses import replace
from math import gcd, prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import PlanTable
from meshwright.cost.placement import distinct, lay
from meshwright.spec.cluster import Link
from tests.cost.cost_examples import even_layout, selene, with_group

LAYOUTS = [even_layout(layers=4, pipeline=1)]


def machines(*, per_node, world, rack_nodes=None):
    rack = Link(bandwidth=300e9, latency_seconds=1e-6) if rack_nodes else None
    return with_group(selene(nodes=-(-world // per_node)), devices_per_node=per_node, rack_nodes=rack_nodes, rack=rack)


def groups_of(dims, world):
    """Every group over `dims`, each (count, step) of nested strides, as arrays of devices."""
    offsets = np.zeros(1, dtype=np.int64)
    for count, step in dims:
        offsets = (offsets[:, None] + np.arange(count) * step).reshape(-1)
    left = set(range(world))
    while left:
        first = min(left)
        members = first + offsets
        left -= set(members.tolist())
        yield np.sort(members)


def brute(dims, *, room, world):
    """Most ranks of a group in a box, fewest of a group that leaves its box, most boxes."""
    size = prod(count for count, _ in dims)
    most, fewest, boxes = 1, size, 1
    for members in groups_of(dims, world):
        _, counts = np.unique(members // room, return_counts=True)
        most, boxes = max(most, counts.max()), max(boxes, len(counts))
        if len(counts) > 1:
            fewest = min(fewest, counts.min())
    return most, fewest, boxes


def laid(dims, *, cluster, world):
    table = PlanTable.build({"replicate": world}, layouts=LAYOUTS)
    given_dims = [(np.array([count]), np.array([step])) for count, step in dims]
    return lay(table, given_dims, group=cluster.groups[0], cluster=cluster)


@settings(max_examples=200)
@given(
    per_node=st.sampled_from([1, 2, 4, 6, 8]),
    count=st.integers(1, 24),
    step=st.sampled_from([1, 2, 3, 4, 8, 16]),
    blocks=st.integers(1, 6),
    rack_nodes=st.sampled_from([None, 2, 3, 18]),
)
def test_one_run_of_ranks_lies_where_counting_puts_it(per_node, count, step, blocks, rack_nodes):
    world = count * step * blocks
    found = laid([(count, step)], cluster=machines(per_node=per_node, world=world, rack_nodes=rack_nodes), world=world)
    tiers = [(per_node, found.per_node, found.fewest, found.nodes)]
    if rack_nodes:
        tiers.append((per_node * rack_nodes, found.per_rack, found.fewest_rack, found.racks))
    for room, held, least, touched in tiers:
        most, fewest, boxes = brute([(count, step)], room=room, world=world)
        if room % step == 0 or step >= room or boxes == 1:
            assert (held[0], least[0], touched[0]) == (most, fewest, boxes)
        assert boxes - 1 <= touched[0] <= boxes + 1
        assert 1 <= least[0] <= count


@settings(max_examples=200)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=4),
    chosen=st.lists(st.booleans(), min_size=4, max_size=4),
    per_node=st.sampled_from([2, 4, 8]),
)
def test_any_axes_of_powers_of_two_lie_where_counting_puts_them(sizes, chosen, per_node):
    steps = [prod(sizes[:index]) for index in range(4)]
    dims = [pair for pair, taken in zip(zip(sizes, steps, strict=True), chosen, strict=True) if taken] or [(1, 1)]
    world = prod(sizes)
    found = laid(dims[::-1], cluster=machines(per_node=per_node, world=world), world=world)
    most, fewest, boxes = brute(dims, room=per_node, world=world)
    assert (found.per_node[0], found.fewest[0], found.nodes[0]) == (most, fewest, boxes)
    assert found.size[0] == prod(count for count, _ in dims)


@given(order=st.permutations(range(3)), sizes=st.lists(st.sampled_from([2, 3, 4]), min_size=3, max_size=3))
def test_the_order_in_which_dims_are_named_means_nothing(order, sizes):
    dims = [(size, prod(sizes[:index])) for index, size in enumerate(sizes)]
    world = prod(sizes)
    cluster = machines(per_node=6, world=world)
    named, permuted = (laid(which, cluster=cluster, world=world) for which in (dims, [dims[i] for i in order]))
    assert named == replace(permuted)
    assert gcd(int(named.size[0]), world) == world


def test_two_racks_that_a_group_fills_unevenly():
    """64 ranks at every second of 128 devices: 36 in the first rack of 72, 28 in the second."""
    found = laid([(64, 2)], cluster=machines(per_node=4, world=128, rack_nodes=18), world=128)
    assert (found.per_rack[0], found.fewest_rack[0], found.racks[0]) == (36.0, 28.0, 2.0)
    assert (found.per_node[0], found.nodes[0]) == (2.0, 32.0)


def test_distinct_rows_stand_for_all():
    rng = np.random.default_rng(1)
    columns = {name: rng.choice([1, 2, 4], 300) for name in ("tensor", "shard", "replicate", "pipeline", "context")}
    table = PlanTable.build({**columns, "microbatch": rng.integers(1, 9, 300)}, layouts=LAYOUTS)
    few, inverse = distinct(table)
    assert len(few) <= 3**5
    for name in columns:
        assert (getattr(few, name)[inverse] == getattr(table, name)).all()
