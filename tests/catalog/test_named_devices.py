"""Cluster files with a device that the catalog does not have, told as one that it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog, cost
from meshwright.catalog.named_devices import OWN_DEVICE
from meshwright.cost.uncertainty import by_analogy
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError

OWN = Path("examples/clusters/own-device.toml")


def test_a_device_like_another_takes_its_shares_and_none_of_what_is_its_own() -> None:
    (group,) = catalog.load_cluster(OWN).groups
    device, other = group.device, catalog.load_cluster("8xA100-80GB").groups[0].device
    assert (device.name, device.kind, device.watts) == ("new-accelerator", other.kind, 600.0)
    assert device.memory_bytes == 96e9
    assert set(device.peak_flops) == set(device.matrix) == {Precision.BF16, Precision.FP32}
    assert device.matrix[Precision.BF16] == other.matrix[Precision.BF16]
    assert device.attention_kernels == other.attention_kernels
    assert device.launch_seconds == other.launch_seconds
    assert device.tiles is None
    assert device.price_per_hour is None
    assert device.sources["memory_bandwidth"] == "the cluster file"
    assert device.sources["matrix"].startswith("by analogy with A100-80GB: ")
    assert by_analogy(device)
    assert device.sources["kind"] == "by analogy with A100-80GB: no run of it was replayed"


def test_sources_that_a_file_names_stand_beside_those_by_analogy(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN.read_text().replace("watts = 600", 'watts = 600\nsources = { watts = "sheet", kind = "mine" }'))
    device = catalog.load_cluster(path).groups[0].device
    assert device.sources["watts"] == "sheet"
    assert device.sources["memory_bandwidth"] == "the cluster file"
    assert device.sources["kind"] == "by analogy with A100-80GB: no run of it was replayed"


def test_a_device_like_another_is_planned_for() -> None:
    from meshwright import search

    job = catalog.load_job(None, sets=["batch_tokens=256Ki", "constraints.fix.shard=16"])
    decision = search.design(catalog.load_model("llama-3.2-1b"), catalog.load_cluster(OWN), job, top=1)
    assert decision.design.cluster.groups[0].device.name == "new-accelerator"
    own = cost.predict(decision.design)
    (group,) = decision.design.cluster.groups
    known = replace(group.device, sources={**group.device.sources, "kind": "seen"})
    seen = cost.predict(
        replace(decision.design, cluster=replace(decision.design.cluster, groups=(replace(group, device=known),)))
    )
    assert own.step_seconds == seen.step_seconds
    assert own.error_band[1] > seen.error_band[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('like = "A100-80GB"', 'like = "Gaudi-9"'), r"like: no device is called 'Gaudi-9'"),
        (('like = "A100-80GB"', "like = 3"), "like: expected the name of a device, got 3"),
        (("fp32 =", "fp8 ="), "no curve for fp8"),
        (("watts = 600", "watts = 600\nsources = 3"), "sources: "),
        (('name = "new-accelerator"\n', ""), "'name' is missing"),
    ],
)
def test_what_is_wrong_with_such_a_device_is_told(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN.read_text().replace(*change))
    with pytest.raises(ConfigError, match=words):
        catalog.load_cluster(path)


@pytest.mark.parametrize("name", ["16xGaudi2", "8xTrainium", "64xTrainium2", "8xAscend910B"])
def test_a_device_that_is_not_known_may_be_described(name: str) -> None:
    with pytest.raises(ConfigError, match="no device is called") as error:
        catalog.load_cluster(name)
    assert OWN_DEVICE in str(error.value)
    assert "## A device of your own" in Path("docs/cluster.md").read_text()
