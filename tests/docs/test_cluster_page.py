"""The page of the cluster file names every field, and its examples are the files beside it."""

from __future__ import annotations

import pytest

from meshwright import catalog
from meshwright.spec.cluster import ClusterSpec, CollectiveFit, DeviceSpec, Link, MatrixCurve, MatrixTiles, NodeGroup
from tests.docs.page import ROOT, page, shows, unnamed

PAGE = page("cluster.md")
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))


@pytest.mark.parametrize("kind", [ClusterSpec, NodeGroup, Link, CollectiveFit, DeviceSpec, MatrixCurve, MatrixTiles])
def test_every_field_is_on_the_page(kind: type) -> None:
    assert unnamed(kind, PAGE) == []


def test_the_examples_of_the_page_are_the_files() -> None:
    assert shows(PAGE, EXAMPLES)


def test_the_examples_say_what_the_page_says() -> None:
    found = {path.stem: catalog.load_cluster(str(path)) for path in EXAMPLES}
    usual = catalog.load_cluster("32xH100").groups[0]
    (even,) = found["even"].groups
    assert (even.device, even.inside, even.nic, even.num_nodes) == (usual.device, usual.inside, usual.nic, 4)
    new, old = found["uneven"].groups
    assert (old.nics, old.nic.bandwidth, old.nic.latency_seconds) == (4, 25e9, pytest.approx(5e-6))
    assert old.nic.sources["bandwidth"] == "the cluster file"
    assert new.nic == usual.nic
    assert found["two-sites"].sites == ("berlin", "oslo")
    assert found["two-sites"].wide_area is not None
    assert found["spelt-out"].groups[0].device.peak_flops["bf16"] == 180e12
