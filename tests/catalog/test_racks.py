"""Racks: one fast domain each, of which a cluster in shorthand has all nodes or as many as batch systems give out."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.search import Question
from meshwright.search.fields import set_cluster
from meshwright.spec.job import JobSpec


def test_the_rack_of_an_nvl72_is_one_fast_domain() -> None:
    (group,) = catalog.load_cluster("gb200-nvl72").groups
    assert group.rack is not None
    assert (group.num_devices, group.rack_nodes, group.rack.bandwidth) == (72, 18, group.inside.bandwidth)


@pytest.mark.parametrize(
    ("name", "nodes_of_racks"),
    [
        ("64xGB200", (18,)),
        ("72xGB200", (18,)),
        ("576xGB200", (18,)),
        ("80xGB200", (18,)),
        ("128xGB200", (16,)),
        ("256xGB300", (16,)),
        ("64x4xGB200", (16,)),
        ("32x8xGB200", (8,)),
        ("4x64xGB200", (1,)),
        ("256xGB200+144xGB300", (16, 18)),
        ("gb200-nvl72:256", (18,)),
        ("16384xTPU-v5p", (8960 // 4,)),
        ("64xH100", (None,)),
    ],
)
def test_racks_that_are_not_filled_are_taken_in_segments(name: str, nodes_of_racks: tuple[int | None, ...]) -> None:
    """16 of an NVL72's 18 nodes where the count divides so and not by whole racks; presets have the racks they name."""
    cluster = catalog.load_cluster(name)
    assert tuple(group.rack_nodes for group in cluster.groups) == nodes_of_racks
    assert ("16 of the 18 nodes of every rack" in cluster.source) == (16 in nodes_of_racks)


def test_whole_racks_can_be_asked_for(tmp_path: Path) -> None:
    """By a set, and in a file, whose racks are whole where it does not say otherwise."""
    asked = Question(model=catalog.load_model("tiny"), cluster=catalog.load_cluster("256xGB200"), job=JobSpec())
    full = set_cluster(asked, ["cluster.rack_nodes=18"]).cluster
    assert full.source.endswith("; but cluster.rack_nodes = 18, which was set")
    (group,) = full.groups
    assert (group.num_nodes, group.rack_nodes) == (64, 18)
    for said, nodes in (("", 18), ("rack_nodes = 16", 16)):
        file = tmp_path / f"racks-{nodes}.toml"
        file.write_text(f'name = "racks"\n[[groups]]\ndevice = "GB200"\nnum_nodes = 64\n{said}\n')
        assert catalog.load_cluster(str(file)).groups[0].rack_nodes == nodes
