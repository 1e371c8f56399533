"""This machine is told by what this process may use of it, and its calibration is found again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from meshwright.run.detect import calibration_file, detect
from meshwright.run.machine import cache_root, this_machine
from meshwright.run.measure import save_cluster
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError, EnvironmentUnfit


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(import_module("meshwright.run.detect"), "accelerator_names", lambda: ())
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))


@pytest.mark.usefixtures("no_accelerator")
def test_a_processor_has_one_worker_a_core() -> None:
    cluster = detect()
    group = cluster.groups[0]
    assert group.device.kind is DeviceKind.CPU
    assert group.cores == group.devices_per_node == this_machine().cores
    assert group.device.memory_bytes * group.devices_per_node == pytest.approx(this_machine().memory_bytes)


@pytest.mark.usefixtures("no_accelerator")
def test_more_workers_than_cores_share_the_memory() -> None:
    cluster = detect(devices=7)
    assert cluster.num_devices == 7
    assert cluster.groups[0].device.memory_bytes == pytest.approx(this_machine().memory_bytes / 7)
    assert cluster.groups[0].cores == this_machine().cores


@pytest.mark.usefixtures("no_accelerator")
def test_a_calibration_is_found_again_for_any_number_of_workers() -> None:
    from dataclasses import replace

    measured = replace(detect(), source="measured in a test")
    save_cluster(measured, path=calibration_file())
    assert "measured in a test" in detect().source
    assert detect(devices=3).num_devices == 3
    assert "measured in a test" in detect(devices=3).source


def test_no_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 devices"):
        detect(devices=0)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", "/a/cache")
    assert cache_root() == Path("/a/cache")
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/meshwright")


@pytest.mark.parametrize(
    ("called", "device", "link"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 450e9),
        ("NVIDIA H100 PCIe", "H100-PCIe", 63e9),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 300e9),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe", 32e9),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe", 32e9),
        ("NVIDIA L40", "L40", 32e9),
        ("NVIDIA L40S", "L40S", 32e9),
        ("Tesla V100-SXM2-32GB", "V100-32GB", 150e9),
        ("NVIDIA GH200 480GB", "GH200", None),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", 32e9),
        ("AMD Instinct MI300X", "MI300X", None),
        ("NVIDIA T400 4GB", "NVIDIA T400 4GB", 20e9),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 20e9),
    ],
)
def test_an_accelerator_is_the_catalog_s_of_what_torch_calls_it(
    called: str, device: str, link: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("meshwright.run.detect"), "accelerator_names", lambda: (called, called))
    (group,) = detect().groups
    assert group.device.name == device
    assert group.devices_per_node == 2
    assert link is None or group.inside.bandwidth == pytest.approx(link, rel=0.02)


def test_unlike_accelerators_in_one_machine_are_refused_but_for_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("Tesla T4", "Tesla T4", "NVIDIA L4")
    monkeypatch.setattr(import_module("meshwright.run.detect"), "accelerator_names", lambda: names)
    with pytest.raises(EnvironmentUnfit, match="Tesla T4 and NVIDIA L4"):
        detect()
    assert detect(devices=2).num_devices == 2
