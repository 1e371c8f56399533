"""The cost follows the placement of ranks on devices, or says that it is not known."""

from dataclasses import replace

import pytest

from meshwright.cost import Layout, predict, timeline
from meshwright.cost.memory import what_memory_counts
from meshwright.cost.predict import predict_all
from meshwright.spec.cluster import Link
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Sharding
from meshwright.spec.report import MemoryPart
from tests.cost.cost_examples import A100, design, llama, selene, with_group

MODEL = llama(width=2048, hidden=8192, heads=16, layers=9, vocab=32000)
QUICK = replace(A100, name="quick", peak_flops={kind: 2 * peak for kind, peak in A100.peak_flops.items()})


def unlike(*, nodes=1):
    """Quick nodes, then slow ones."""
    quick, slow = selene(nodes=nodes, device=QUICK), selene(nodes=nodes)
    groups = (replace(quick.groups[0], name="quick"), replace(slow.groups[0], name="slow"))
    return replace(slow, groups=groups)


def placed(entry, placement):
    return replace(entry, plan=replace(entry.plan, placement=tuple(placement)))


def uneven(cluster):
    """Two stages of whom the first has more work: seven layers before two and a head."""
    layout = Layout(bounds=(0, 8, 11), ranks=(0, 1))
    return design(MODEL, cluster, pipeline=2, shard=8, microbatches=8, microbatch=4, layout=layout)


def test_stages_on_unlike_machines_cost_what_they_cost_there():
    entry = uneven(unlike())
    turned = placed(entry, [*range(8, 16), *range(8)])
    other = replace(entry, cluster=replace(entry.cluster, groups=entry.cluster.groups[::-1]))
    assert predict(turned).step.seconds == predict(other).step.seconds
    assert predict(turned).step.seconds != pytest.approx(predict(entry).step.seconds, rel=0.1)
    last = max(span.start + span.seconds for span in timeline(turned))
    assert last == pytest.approx(predict(turned).step.seconds, rel=1e-6)


def test_places_in_a_node_and_equal_nodes_are_alike():
    entry = uneven(selene(nodes=2))
    usual = predict(entry)
    for placement in (range(16), [*range(7, -1, -1), *range(8, 16)], [*range(8, 16), *range(8)]):
        assert predict(placed(entry, placement)).step == usual.step


def test_nodes_that_are_left_out_do_not_count():
    """Eight ranks on the slow node of two."""
    entry = design(MODEL, unlike(), shard=8, microbatches=8)
    slow = predict(replace(entry, cluster=selene(nodes=2))).step.seconds
    assert predict(placed(entry, range(8, 16))).step.seconds == slow
    assert predict(entry).step.seconds < slow


def sites(*, wide=1e9):
    """Three nodes in the north, then three in the south."""
    groups = tuple(replace(selene(nodes=3).groups[0], name=name, site=name) for name in ("north", "south"))
    return replace(selene(nodes=3), groups=groups, wide_area=Link(bandwidth=wide, latency_seconds=0.02))


def test_nodes_that_are_left_out_of_a_used_site_lie_next_to_it():
    """Two nodes of the second site, the third of which is not used: they cost what two nodes alone do."""
    entry = uneven(sites())
    alone = predict(replace(entry, cluster=selene(nodes=2)))
    for placement in (range(24, 40), range(32, 48), [*range(40, 48), *range(24, 32)]):
        found = predict(placed(entry, placement))
        assert found.step.seconds == alone.step.seconds
        assert "32 devices are not used" in found.notes


def test_stages_cross_between_sites_of_which_neither_is_used_whole():
    near, far = (predict(placed(uneven(sites(wide=wide)), [*range(8), *range(32, 40)])) for wide in (1e11, 1e7))
    assert predict(placed(uneven(sites()), range(16))).step.seconds < near.step.seconds < far.step.seconds


@pytest.mark.parametrize(
    "placement",
    [
        [*range(0, 16, 2), *range(1, 16, 2)],
        [*range(4, 12), *range(4), *range(12, 16)],
        [*range(8), *range(7, 15)],
        [*range(8), *range(16, 24)],
    ],
)
def test_ranks_of_one_node_on_several_are_an_error_with_a_name(placement):
    with pytest.raises(ConfigError) as caught:
        predict(placed(uneven(selene(nodes=2)), placement))
    assert caught.value.problems[0].where == "plan.placement"


def test_racks_are_placed_whole():
    rack = Link(bandwidth=300e9, latency_seconds=3e-6)
    cluster = with_group(selene(nodes=4), rack=rack, rack_nodes=2)
    entry = design(MODEL, cluster, pipeline=2, shard=16, microbatches=8)
    whole = [*range(16, 32), *range(16)]
    assert predict(placed(entry, whole)).step == predict(entry).step
    with pytest.raises(ConfigError, match="racks"):
        predict(placed(entry, [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]))


def test_a_site_is_placed_whole():
    group = selene(nodes=2).groups[0]
    groups = tuple(replace(group, name=name, site=name) for name in ("north", "south"))
    wide = Link(bandwidth=1e9, latency_seconds=0.02)
    cluster = replace(selene(nodes=2), groups=groups, wide_area=wide)
    entry = design(MODEL, cluster, pipeline=4, shard=8, microbatches=8)
    turned = placed(entry, [*range(16, 32), *range(16)])
    assert predict(turned).step.seconds == pytest.approx(predict(entry).step.seconds)
    with pytest.raises(ConfigError, match="site"):
        predict(placed(entry, [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]))


def test_a_row_costs_the_same_whatever_other_rows_use():
    """Rows of the quick machines alone are not priced with the network of the slow ones that others use."""
    cluster = unlike(nodes=2)
    far = replace(cluster.groups[1], nic=replace(cluster.groups[1].nic, bandwidth=1e8, fits=()))
    cluster = replace(cluster, groups=(cluster.groups[0], far))
    some = [design(MODEL, cluster, pipeline=2, shard=shard, microbatches=8) for shard in (16, 8, 4)]
    for entry, report in zip(some, predict_all(some), strict=True):
        assert report.step.seconds == predict(entry).step.seconds
        assert report.memory == predict(entry).memory
    quick = replace(some[1], cluster=selene(nodes=2, device=QUICK))
    assert predict(some[1]).step.seconds == predict(quick).step.seconds


def test_memory_is_that_of_other_machines_but_for_what_is_reserved_where_all_that_counts_is_the_same():
    slow, other = selene(nodes=2).groups[0], selene(nodes=2, device=QUICK).groups[0]
    other = replace(other, nics=1, nic=replace(other.nic, bandwidth=1e9), name="other")
    entry = design(MODEL, selene(nodes=2), pipeline=2, shard=8, microbatches=8)
    held = predict(replace(entry, cluster=replace(entry.cluster, groups=(other,)))).memory
    assert held == predict(entry).memory
    fuller = replace(other, device=replace(other.device, reserved_bytes=2 * other.device.reserved_bytes + 1))
    assert what_memory_counts(slow, entry.job) == what_memory_counts(fuller, entry.job)
    more = predict(replace(entry, cluster=replace(entry.cluster, groups=(fuller,)))).memory
    for theirs, ours in zip(more, held, strict=True):
        assert theirs.parts == {**ours.parts, MemoryPart.RESERVED: fuller.device.reserved_bytes}


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.PARAMETERS])
def test_ranks_on_machines_of_two_kinds_hold_what_either_holds_alone(sharding):
    """Peaks that are worked out once for both kinds are those of each."""
    cluster = unlike()
    quick, slow = cluster.groups
    slow = replace(slow, device=replace(slow.device, reserved_bytes=3 * slow.device.reserved_bytes + 7))
    entry = uneven(replace(cluster, groups=(quick, slow)))
    entry = replace(entry, plan=design(MODEL, cluster, pipeline=2, shard=8, microbatches=8, sharding=sharding).plan)
    mixed = predict(entry).memory
    for stage, group in enumerate((quick, slow)):
        alone = predict(replace(entry, cluster=replace(selene(nodes=2), groups=(replace(group, num_nodes=2),))))
        assert mixed[stage] == alone.memory[stage]
