"""Which link is slow, from matrices of seconds: of then and now, of the first alone, and of what is described."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.spec.cluster import ClusterSpec, Link
from meshwright.train.events import LinksProbed
from meshwright.train.observe.described import Described, described, undescribed
from meshwright.train.observe.links import SlowLink, least, slow_from_start, slow_links

HOSTS = ("a", "b", "c", "d")
SIZE = 1 << 20


def probed(seconds: float = 0.1, *, slow: dict[tuple[str, str], float] | None = None, count: int = 4) -> LinksProbed:
    names = HOSTS[:count]
    rows = [[0.0 if one == other else seconds for other in names] for one in names]
    for (one, other), times in (slow or {}).items():
        rows[names.index(one)][names.index(other)] *= times
    matrix = tuple(tuple(row) for row in rows)
    return LinksProbed(hosts=names, host_of=tuple(range(count)), num_bytes=SIZE, seconds=matrix)


def test_a_single_cell_is_a_link() -> None:
    (found,) = slow_links(probed(), probed(slow={("a", "c"): 3.0, ("c", "a"): 2.5}))
    assert found.hosts == ("a", "c")
    assert found.before / found.now == pytest.approx(3.0)
    assert found.words == "the link a - c gives 28.0 Mbit/s of the 83.9 Mbit/s it gave"


def test_a_row_and_a_column_are_a_host() -> None:
    slow = {pair: 4.0 for one in "abd" for pair in ((one, "c"), ("c", one))}
    (found,) = slow_links(probed(), probed(slow=slow))
    assert found.hosts == ("c",)
    assert found.words.startswith("all links of host c give ")


def test_all_of_them_are_the_network_between_them() -> None:
    (found,) = slow_links(probed(), probed(0.25))
    assert found.hosts == HOSTS


def test_of_two_hosts_it_is_the_link_between_them() -> None:
    (found,) = slow_links(probed(count=2), probed(0.3, count=2))
    assert found.hosts == ("a", "b")


def test_a_little_slower_is_not_slow_and_neither_is_the_start_of_a_message() -> None:
    assert slow_links(probed(), probed(0.115)) == ()
    assert slow_links(probed(), probed(0.13)), "what is slower by three tenths is told"
    assert slow_links(probed(1e-4), probed(5e-4)) == ()


def test_hosts_that_were_not_probed_say_nothing() -> None:
    alone = LinksProbed(hosts=("a",), host_of=(0, 0), num_bytes=0, seconds=())
    assert slow_links(alone, alone) == ()


def beside_others(probe: LinksProbed) -> tuple[SlowLink, ...]:
    return slow_from_start(probe, undescribed(probe))


def test_a_link_that_was_never_fast_is_told_beside_another() -> None:
    (found,) = beside_others(probed(slow={("a", "c"): 3.0, ("c", "a"): 2.5}))
    assert found.hosts == ("a", "c")
    assert found.before / found.now == pytest.approx(3.0)
    assert found.words == "the link a - c gives 28.0 Mbit/s from the start, where the link a - b gives 83.9 Mbit/s"
    assert [found.hosts for found in beside_others(probed(slow={("c", "b"): 3.0}, count=3))] == [("b", "c")]


@pytest.mark.parametrize("count", [3, 4])
def test_an_adapter_that_was_never_fast_is_told_beside_links_of_others(count: int) -> None:
    slow = {pair: 3.0 for one in "abd"[: count - 1] for pair in ((one, "c"), ("c", one))}
    (found,) = beside_others(probed(slow=slow, count=count))
    assert found.hosts == ("c",)
    assert found.words.startswith("all links of host c give 28.0 Mbit/s from the start, where the link a - b gives ")


def test_alike_links_are_not_told_whatever_they_scatter_by() -> None:
    """Of the two tries of each link one in twenty stutters; the quicker counts, as in a probe, and what is doubted is
    asked again."""
    alarms, found = 0, 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        hosts = 2 + seed % 7
        slow = draw.integers(0, hosts, 2) if seed % 2 and hosts > 3 else None
        tries = [scattered(draw, hosts, slow=slow) for _ in range(2)]
        told = beside_others(least(*tries)) if beside_others(tries[0]) else ()
        if slow is None or slow[0] == slow[1]:
            alarms += len(told)
        else:
            found += [each.hosts for each in told] == [tuple(f"host{index}" for index in sorted(slow.tolist()))]
    assert alarms == 0
    assert found >= 45, "of 47 links of half the rate"


def scattered(draw: np.random.Generator, hosts: int, *, slow: np.ndarray | None) -> LinksProbed:
    shape = (2, hosts, hosts)
    tries = 0.05 * np.exp(0.08 * draw.standard_normal(shape))
    took = np.where(draw.random(shape) < 0.05, draw.uniform(2.0, 6.0, shape), 1.0) * tries
    seconds = took.min(axis=0) * (1.0 - np.eye(hosts))
    if slow is not None:
        seconds[[slow[0], slow[1]], [slow[1], slow[0]]] *= 2.0
    return LinksProbed(
        hosts=tuple(f"host{index}" for index in range(hosts)),
        host_of=tuple(range(hosts)),
        num_bytes=SIZE,
        seconds=tuple(tuple(row) for row in seconds.tolist()),
    )


def cluster(*sites: str, bandwidth: float = 12.5e6, wide: float | None = None) -> ClusterSpec:
    """A node of one device at each of `sites`."""
    local = catalog.local_cluster(cores=1, memory_bytes=2e9, devices=1).groups[0]
    nic = Link(bandwidth=bandwidth, latency_seconds=1e-4, efficiency=1.0)
    groups = tuple(replace(local, name=f"node{index}", site=site, nic=nic) for index, site in enumerate(sites))
    return ClusterSpec(name="test", groups=groups, wide_area=None if wide is None else replace(nic, bandwidth=wide))


def said_of(probe: LinksProbed, found: ClusterSpec) -> Described:
    return described(probe, cluster=found, devices=range(len(probe.hosts)))


def test_of_two_hosts_the_description_tells() -> None:
    """1 MiB takes 0.084 s at 100 Mbit/s."""
    slow = probed(0.3, count=2)
    (found,) = slow_from_start(slow, said_of(slow, cluster("x", "x")))
    assert found.hosts == ("a", "b")
    assert found.words.startswith("the link a - b gives 28.0 Mbit/s from the start, where the cluster's description ")
    assert slow_from_start(probed(count=2), said_of(probed(count=2), cluster("x", "x"))) == ()
    assert beside_others(slow) == (), "there is no other to hold it against"


def test_links_between_sites_are_slower_than_those_in_them_and_share_what_there_is() -> None:
    said = said_of(probed(), cluster("x", "x", "y", "y", wide=2.5e6))
    shared, alone = said.seconds[0, 2], said.seconds[1, 2]
    assert shared / alone == pytest.approx(2.0, rel=0.01), "both hosts of a site send to the other at once"
    as_said = replace(probed(), seconds=tuple(tuple(row) for row in said.seconds.tolist()))
    assert slow_from_start(as_said, said) == ()
    seconds = said.seconds.copy()
    seconds[1, 2] *= 3.0
    (found,) = slow_from_start(replace(as_said, seconds=tuple(tuple(row) for row in seconds.tolist())), said)
    assert found.hosts == ("b", "c")
    assert "where the link " in found.words
