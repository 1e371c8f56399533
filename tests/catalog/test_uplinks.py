"""Sites with links of their own, in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright import catalog
from tests.catalog.test_clusters import refused


def test_a_site_may_have_an_uplink_of_its_own(tmp_path: Path) -> None:
    sites, file = catalog.load_cluster("two-sites"), tmp_path / "sites.toml"
    assert sites.wide_area is not None
    slow = replace(sites.wide_area, bandwidth=1e8)
    uneven = replace(sites, uplinks={"west": slow})
    catalog.save(uneven, file)
    assert catalog.load_cluster(str(file)) == uneven
    assert uneven.between("east", "west") == slow
    catalog.save(replace(uneven, uplinks={"wset": slow}), file)
    assert "uplinks.wset: there is no site wset" in refused(str(file))
    catalog.save(replace(uneven, wide_area=None), file)
    assert "nothing joins site east" in refused(str(file))
