"""Sites with links of their own, in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("field", "value"), [("torus", 3), ("wraps", 4), ("peers", 7), ("across_sockets", 1e10), ("sums", 0.5)]
)
def test_what_is_of_links_inside_a_site_is_refused_of_those_between_sites(
    tmp_path: Path, field: str, value: float
) -> None:
    sites, file = catalog.load_cluster("two-sites"), tmp_path / "sites.toml"
    assert sites.wide_area is not None
    odd = replace(sites.wide_area, **{field: value})
    catalog.save(replace(sites, uplinks={"west": odd}), file)
    said = refused(str(file))
    assert f"uplinks.west.{field}: sites are not joined by " in said
    assert "leave it out, or say it of groups[1].inside" in said
    catalog.save(replace(sites, wide_area=odd), file)
    assert f"wide_area.{field}: sites are not joined by " in refused(str(file))
