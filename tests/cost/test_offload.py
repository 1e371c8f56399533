"""The host's memory: what its link and the devices beside one leave of it."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.cost.offload import carried_seconds, host_rate
from meshwright.spec.cluster import Link
from meshwright.spec.errors import ConfigError
from tests.cost.cost_examples import selene

LINK = Link(bandwidth=30e9, latency_seconds=1e-5, efficiency=0.8)


def group(**changes):
    return replace(selene(nodes=1).groups[0], **{"host": LINK, "host_bandwidth": None, **changes})


def test_devices_that_copy_at_once_share_the_switch_and_the_memory_behind_it():
    assert host_rate(group()) == pytest.approx(24e9)
    assert host_rate(group(host=replace(LINK, oversubscription=2.0))) == pytest.approx(12e9)
    assert host_rate(group(host_bandwidth=80e9)) == pytest.approx(10e9)
    assert host_rate(group(host_bandwidth=800e9)) == pytest.approx(24e9)


def test_copies_take_latency_and_bytes_where_they_are_made():
    seconds = carried_seconds(np.array([24e9, 24e9]), np.array([True, False]), group=group())
    assert seconds == pytest.approx([1.00001, 0.0])
    assert not carried_seconds(np.ones(2), np.zeros(2, dtype=bool), group=group(host=None)).any()
    with pytest.raises(ConfigError):
        carried_seconds(np.ones(1), np.ones(1, dtype=bool), group=group(host=None))


@pytest.mark.parametrize("name", ["2x8xA100-80GB", "4x8xH100"])
def test_a_node_never_copies_more_than_its_memory_streams(name):
    (entry,) = catalog.load_cluster(name).groups
    assert 0.0 < host_rate(entry) * entry.devices_per_node <= entry.host_bandwidth


def test_two_devices_of_a_pair_copy_no_more_than_one_link_carries():
    (entry,) = catalog.load_cluster("2x8xA100-80GB").groups
    assert 2.0 * host_rate(entry) == pytest.approx(entry.host.bandwidth * entry.host.efficiency)
