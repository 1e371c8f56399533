"""doctor tries things for real: this machine's rows are told, and a broken place or clock fails its row."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from meshwright.run.doctor import Row, State, doctor, healthy
from meshwright.run.probes import TorchFacts

module = import_module("meshwright.run.doctor")
NAMES = {"python", "torch", "gloo", "accelerators", "disk", "C++ compiler", "port", "clock", "tokenizers"}


def row(rows: tuple[Row, ...], name: str) -> Row:
    return next(entry for entry in rows if entry.name == name)


def test_this_machine_is_examined_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    rows = doctor(folder=tmp_path)
    assert {entry.name for entry in rows} >= NAMES
    assert row(rows, "gloo").state is State.OK
    assert "all-reduced" in row(rows, "gloo").found
    assert row(rows, "calibration").state is State.WARN
    assert all(entry.command for entry in rows)
    assert healthy(rows)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_fails(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert module._disk(missing).state is State.FAIL
    assert module._disk_speed(missing).state is State.FAIL
    assert not healthy((module._disk(missing),))


def test_a_clock_apart_from_the_file_system_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert module._clock(tmp_path).state is State.OK
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 3600.0)
    assert module._clock(tmp_path).state is State.WARN


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert module._compiler().state is State.WARN
    monkeypatch.setenv("CXX", "icpx")
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/opt/{name}")
    assert module._compiler().found == "/opt/icpx"


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", State.FAIL), ("2.11.0", State.OK), ("2.13.0+cpu", State.OK), ("2.14.0", State.WARN)],
)
def test_the_range_of_torch_is_known(version: str, state: State) -> None:
    assert module._torch(TorchFacts(version=version, accelerators=(), nccl="")).state is state


def test_two_accelerators_without_nccl_fail() -> None:
    facts = TorchFacts(version="2.13.0", accelerators=("NVIDIA H100", "NVIDIA H100"), nccl="")
    rows = {entry.name: entry for entry in module._accelerators(facts)}
    assert rows["accelerators"].found == "2 x NVIDIA H100"
    assert rows["nccl"].state is State.FAIL


def test_missing_tokenizers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._tokenizers().state is State.OK
    monkeypatch.setattr(module, "installed", lambda name: "not installed" if name == "tokenizers" else "1.0")
    assert module._tokenizers().state is State.FAIL


def test_a_damaged_calibration_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", os.fspath(tmp_path))
    path = module.calibration_file()
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert module._calibration().state is State.WARN
    path.write_text('{"source": "measured yesterday"}')
    assert module._calibration().found == "measured yesterday"
    assert module._calibration().state is State.OK
