"""Islands are found from rates between pairs, and make a cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from meshwright import catalog
from meshwright.lab.links import Pair, cluster_of, islands
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.report import Origin

FAST, SLOW = 120e6, 11e6


def pairs(sites: list[int], *, jitter: float = 0.0) -> list[Pair]:
    found = []
    for place, (first, second) in enumerate(combinations(range(len(sites)), 2)):
        near = sites[first] == sites[second]
        rate = (FAST if near else SLOW) * (1.0 - jitter * (place % 3) / 2)
        latency = 1e-5 if near else 1e-2
        found.append(Pair(first=first, second=second, bandwidth=rate, latency_seconds=latency))
    return found


def cluster(found: list[Pair], nodes: list[NodeGroup]) -> ClusterSpec:
    hosts = [f"host{number}" for number in range(len(nodes))]
    return cluster_of(found, name="lab", hosts=hosts, nodes=nodes, origin=Origin.ANALYTIC)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_islands_are_the_sites(jitter: float) -> None:
    assert islands(pairs([0, 0, 1, 1], jitter=jitter), hosts=4) == ((0, 1), (2, 3))
    assert islands(pairs([0, 1, 0, 1, 1], jitter=jitter), hosts=5) == ((0, 2), (1, 3, 4))


def test_a_link_that_was_disturbed_is_still_of_its_island() -> None:
    disturbed = [replace(pair, bandwidth=0.4 * FAST) if pair.second == 3 else pair for pair in pairs([0, 0, 1, 1])]
    far = {(0, 3), (1, 3)}
    found = [replace(pair, bandwidth=SLOW) if (pair.first, pair.second) in far else pair for pair in disturbed]
    assert islands(found, hosts=4) == ((0, 1), (2, 3))


def test_like_links_make_one_island() -> None:
    assert islands(pairs([0, 0, 0], jitter=0.3), hosts=3) == ((0, 1, 2),)
    assert islands([], hosts=1) == ((0,),)


def test_the_cluster_has_a_site_for_each_island_and_the_slowest_link_of_each_tier() -> None:
    local = catalog.local_cluster(cores=1, memory_bytes=2e9, devices=1).groups[0]
    found = cluster(pairs([0, 0, 1, 1], jitter=0.3), [local] * 4)
    assert [group.num_nodes for group in found.groups] == [2, 2]
    assert found.sites == ("island0", "island1")
    assert found.wide_area is not None
    assert found.wide_area.bandwidth == pytest.approx(SLOW * 0.7)
    assert found.wide_area.latency_seconds == 1e-2
    assert found.groups[0].nic.bandwidth == FAST
    assert found.groups[0].nic.efficiency == 1.0
    assert found.groups[1].nic.sources["2:host2 3:host3"] == "672 Mbit/s, 10.0 us one way"
    assert sum(" one way" in source for source in found.wide_area.sources.values()) == 4
    assert [group.device for group in found.groups] == [local.device] * 2


def test_islands_that_reach_others_faster_than_the_slowest_have_uplinks_of_their_own() -> None:
    local = catalog.local_cluster(cores=1, memory_bytes=2e9, devices=1).groups[0]
    slower = [
        replace(pair, bandwidth=0.2 * SLOW) if pair.second > 3 > pair.first or pair.first == 3 < pair.second else pair
        for pair in pairs([0, 0, 1, 1, 2, 2])
    ]
    found = cluster(slower, [local] * 6)
    assert found.sites == ("island0", "island1", "island2")
    assert set(found.uplinks) == {"island0", "island1"}
    for one, other, rate in (("island0", "island1", SLOW), ("island1", "island2", 0.2 * SLOW)):
        between = found.between(one, other)
        assert between is not None
        assert between.bandwidth == pytest.approx(rate)
    assert not cluster(pairs([0, 0, 1, 1, 2], jitter=0.3), [local] * 5).uplinks


def test_unlike_hosts_of_an_island_are_groups_of_their_own() -> None:
    local = catalog.local_cluster(cores=1, memory_bytes=2e9, devices=1).groups[0]
    twice = replace(local, devices_per_node=2)
    found = cluster(pairs([0, 0, 0]), [local, twice, twice])
    assert [(group.num_nodes, group.devices_per_node) for group in found.groups] == [(1, 1), (2, 2)]
    assert found.sites == ("island0",)
    assert found.wide_area is None
