"""Links of nodes: times that were measured belong to the link they were measured on, and boards may be had in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.catalog.node_links import NVLINK_A100, NVLINK_B200, NVLINK_H100, NVLINK_V100
from meshwright.catalog.nodes import group_of, nodes
from meshwright.spec.cluster import Link

MEASURED = (NVLINK_A100, NVLINK_H100, NVLINK_B200, NVLINK_V100)


def figures(link: Link) -> tuple[float | None, ...]:
    return (link.bandwidth, link.latency_seconds, link.efficiency, link.peers, link.across_sockets)


@pytest.mark.parametrize("name", [*(entry.name for entry in catalog.clusters() if entry.name != "local"), *nodes()])
def test_a_link_with_other_figures_keeps_no_times_measured(name: str) -> None:
    groups = (group_of(name, nodes_count=1),) if name in nodes() else catalog.load_cluster(name).groups
    for link in (link for group in groups for link in (group.inside, group.nic, group.rack, group.host)):
        if link is not None and link.fits:
            assert figures(link) in [figures(known) for known in MEASURED if known.fits == link.fits]


def test_two_devices_of_a_triple_of_summit_have_two_bricks_and_triples_the_bus_between_processors() -> None:
    group = catalog.load_cluster("summit").groups[0]
    inside, host = group.inside, group.host
    assert (inside.bandwidth, inside.peers) == (2 * 50e9, 2)
    assert inside.across_sockets == pytest.approx(inside.efficiency * 64e9)
    assert host is not None
    assert (host.bandwidth, host.peers, host.across_sockets) == (50e9, None, None)


def test_a_tpu_v3_has_four_links_of_656_gigabits() -> None:
    chip, core = (group_of(name, nodes_count=1).inside for name in ("TPU-v3", "TPU-v3-core"))
    assert chip.bandwidth == 2 * core.bandwidth == 4 * 656e9 / 8


@pytest.mark.parametrize("name", ["V100-16GB", "MI300X"])
def test_a_part_of_a_board_is_written_and_read(name: str, tmp_path: Path) -> None:
    """It has the links of the whole board, of which some lead to devices that are not its own."""
    cluster = catalog.load_cluster(f"4x{name}")
    assert (cluster.groups[0].inside.peers or 0) > cluster.groups[0].devices_per_node
    catalog.save(cluster, tmp_path / "part.toml")
    assert catalog.load_cluster(str(tmp_path / "part.toml")) == cluster


@pytest.mark.parametrize("name", ["A100-80GB", "A100-40GB", "H100", "H200", "GH200"])
def test_four_devices_that_are_a_whole_node_have_no_switch(name: str) -> None:
    """Two of them share a third of the links; four of a node of eight have its switch."""
    quad, part = (catalog.load_cluster(f"{shorthand}{name}").groups[0].inside for shorthand in ("2x4x", "4x"))
    assert (quad.peers, quad.fits, quad.sums) == (3, (), None)
    assert quad.bandwidth == part.bandwidth
    assert part.peers is None
