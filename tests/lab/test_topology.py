"""A cluster's tiers as cables: what one flow has between two hosts is what the cluster's links say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import catalog
from meshwright.lab import topology
from meshwright.spec.cluster import ClusterSpec, Link
from meshwright.spec.errors import ConfigError

SLOW = Link(bandwidth=12.5e6, latency_seconds=10e-3)


def two_sites(nodes: int = 2) -> ClusterSpec:
    cluster = catalog.load_cluster(f"{8 * nodes}xA100-80GB")
    group = cluster.groups[0]
    return replace(
        cluster, groups=(replace(group, site="near"), replace(group, name="far", site="far")), wide_area=SLOW
    )


def test_hosts_of_a_site_meet_below_its_uplink() -> None:
    found = topology(two_sites())
    adapters = two_sites().groups[0].nics * two_sites().groups[0].nic.bandwidth
    assert found.hosts == ("host0", "host1", "host2", "host3")
    assert found.between(0, 1) == (adapters, 0.0)
    assert found.between(1, 2) == (SLOW.bandwidth, SLOW.latency_seconds)
    assert [uplink.below for uplink in found.path(1, 2)] == ["host1", "site-near", "site-far", "host2"]


def test_a_site_has_an_uplink_of_its_own_and_two_meet_at_the_slower_one() -> None:
    quick = replace(SLOW, bandwidth=125e6, latency_seconds=30e-3)
    cluster = replace(two_sites(), uplinks={"near": quick})
    found = topology(cluster)
    assert {uplink.below: uplink.bandwidth for uplink in found.uplinks if uplink.above == "core"} == {
        "site-near": quick.bandwidth,
        "site-far": SLOW.bandwidth,
    }
    between = cluster.between("near", "far")
    assert between is not None
    assert found.between(1, 2) == (between.bandwidth, between.latency_seconds) == (SLOW.bandwidth, 20e-3)


def test_hosts_share_the_machine_as_their_devices_are_fast() -> None:
    cluster = two_sites(nodes=1)
    fast, slow = cluster.groups
    peaks = {precision: 0.5 * peak for precision, peak in slow.device.peak_flops.items()}
    uneven = replace(cluster, groups=(fast, replace(slow, device=replace(slow.device, peak_flops=peaks))))
    assert topology(cluster).even
    assert topology(uneven).shares == pytest.approx((2 / 3, 1 / 3))
    assert not topology(uneven).even


def test_racks_and_oversubscription_are_cables_that_hosts_share() -> None:
    cluster = catalog.load_cluster("32xA100-80GB")
    group = cluster.groups[0]
    nic = replace(group.nic, oversubscription=4.0)
    racked = replace(
        cluster, groups=(replace(group, nic=nic, rack=Link(bandwidth=1e9, latency_seconds=0.0), rack_nodes=2),)
    )
    found = topology(racked)
    total = group.num_nodes * group.nics * nic.bandwidth
    shared = {uplink.below: uplink.bandwidth for uplink in found.uplinks}
    assert shared["group0"] == total / 4.0
    assert shared["group0-rack0"] == 2 * group.nics * nic.bandwidth
    assert shared["host0"] == 8e9
    assert [uplink.below for uplink in found.path(0, 1)] == ["host0", "host1"]
    assert [uplink.below for uplink in found.path(0, 2)] == ["host0", "group0-rack0", "group0-rack1", "host2"]


def test_loss_is_of_the_wide_area_alone() -> None:
    found = topology(two_sites(), loss=0.01)
    assert {uplink.below for uplink in found.uplinks if uplink.loss} == {"site-near", "site-far"}


def test_a_loss_where_no_link_is_of_the_wide_area_is_refused() -> None:
    with pytest.raises(ConfigError, match="of which it has none"):
        topology(catalog.load_cluster("16xH100"), loss=0.01)


def test_a_delay_no_longer_than_a_virtual_link_s_own_is_left_to_it() -> None:
    assert not any(uplink.is_delayed for uplink in topology(catalog.load_cluster("16xH100")).uplinks)


def test_more_hosts_than_a_machine_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="a lab of 2048 hosts"):
        topology(catalog.load_cluster("16384xH100"))
