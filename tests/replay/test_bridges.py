"""Links between boards: lanes of PCI Express, rates that are reached, and bridges of NVLink."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.catalog.node_links import BRIDGES
from meshwright.replay.express import express
from meshwright.replay.remarks import remarks
from meshwright.replay.runs import Run, read_runs
from meshwright.spec.cluster import Link
from tests.replay.test_validate import ROW, row

PAIR = {"gpu": "RTX 3090 Ti", "n_gpus": "2", "gpus_per_node": "2", "tp": "1", "pp": "1", "dp": "2", "zero": "0"}


def inside(run: Run) -> Link:
    return express(run).design.cluster.groups[0].inside


@pytest.mark.parametrize("text", ["NVLink", "NVLink3", "NVLink 112.5 GB/s", "NVLink bridge", "NV-Link"])
def test_a_bridge_joins_a_pair(text: str) -> None:
    """Four links of 14.06 GB/s each way (NVIDIA's paper on GA102)."""
    assert inside(row(**PAIR, intra_link=text)) == BRIDGES["RTX-3090"]
    assert BRIDGES["RTX-3090"].bandwidth == 4 * 14.0625e9
    two_of_eight = {**PAIR, "gpus_per_node": ""}
    assert inside(row(**two_of_eight, intra_link=text)) == BRIDGES["RTX-3090"]


@pytest.mark.parametrize(
    ("text", "gigabytes", "share"),
    [
        ("", 31.5, 0.66),
        ("PCIe Gen4", 31.5, 0.66),
        ("PCIe 4.0 x16", 31.5, 0.66),
        ("PCIe Gen4 x8", 15.75, 0.66),
        ("PCIe Gen3, 4 lanes", 15.75 / 4, 0.66),
        ("PCIe Gen4 64 GB/s", 31.5, 0.66),
        ("PCIe 6.2 GB/s", 6.2, 1.0),
        ("PCIe x8, 50 Gb/s", 6.25, 1.0),
    ],
)
def test_lanes_and_rates_of_pci_express_are_read(text: str, gigabytes: float, share: float) -> None:
    """A rate that lanes do not reach is a data sheet's, any other is what was measured."""
    link = inside(row(**PAIR, intra_link=text))
    assert link.bandwidth == pytest.approx(gigabytes * 1e9)
    assert link.efficiency == share
    assert link.across_sockets is not None
    assert link.across_sockets / link.achieved == pytest.approx(0.48 / 0.66)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"gpus_per_node": "4", "n_gpus": "4", "dp": "4"}, "a bridge joins two boards, and more are in a node"),
        ({"gpu": "RTX 4090"}, "no bridge of NVLink joins RTX-4090"),
    ],
)
def test_a_bridge_that_is_not_taken_is_remarked(tmp_path: Path, cells: dict[str, str], why: str) -> None:
    columns = {**ROW, **PAIR, "intra_link": "NVLink", **cells}
    assert "PCI Express" in inside(Run(line=2, columns=columns)).sources["bandwidth"]
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, list(columns))
        table.writeheader()
        table.writerow(columns)
    assert remarks(read_runs(file)) == {f"intra_link 'NVLink' is not read: {why}": 1}


def test_nvlink_of_servers_is_their_own() -> None:
    assert inside(row(intra_link="NVLink")) == inside(row())
