"""This machine is told by what this process may use of it, and its calibration is found again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from meshwright.run.detect import calibration_file, detect
from meshwright.run.machine import cache_root, this_machine
from meshwright.run.measure import save_cluster
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError


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
