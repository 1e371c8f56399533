"""`meshwright cluster measure --across`: several hosts and the links between them as one cluster."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.cli import main
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec, DeviceKind
from meshwright.spec.errors import ExitCode
from meshwright.spec.report import Origin
from tests.cli.test_lab import EXAMPLE, makes_labs
from tests.run.launching import sshd_here

# Answers as a host does that has been measured, and is this machine's Python in all else.
PYTHON = """#!/bin/sh
case "$*" in
*"cluster detect"*) exec cat {folder}/said.json ;;
*"cluster measure"*) echo "$*" >> {folder}/asked; exec cat {folder}/measured.json ;;
esac
exec {python} "$@"
"""
HOSTS = "ssh:127.0.0.7,127.0.0.8"


def measured_by(cluster: ClusterSpec, *, peak: float) -> ClusterSpec:
    group = cluster.groups[0]
    device = replace(group.device, peak_flops=dict.fromkeys(group.device.peak_flops, peak), memory_bytes=1.0)
    return replace(cluster, groups=(replace(group, device=device),))


def test_hosts_that_are_alike_are_measured_once_and_their_links_pair_by_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = catalog.local_cluster(cores=1, memory_bytes=2e9, devices=1)
    (tmp_path / "said.json").write_text(codec.canonical(said))
    (tmp_path / "measured.json").write_text(codec.canonical(measured_by(said, peak=7e9)))
    python = tmp_path / "python"
    python.write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sshd_here.pretended(tmp_path)}:{os.environ['PATH']}")
    out = tmp_path / "found.json"
    words = ["cluster", "measure", "--across", HOSTS, "--seconds", "6", "--python", str(python)]
    assert main([*words, "--json", "--out", str(out)]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    document, found = json.loads(told.out), catalog.load_cluster(str(out))
    assert document["cluster"] == codec.encode(found)
    assert document["hosts"] == ["127.0.0.7", "127.0.0.8"]
    assert document["islands"] == [[0, 1]]
    assert [group.num_nodes for group in found.groups] == [2]
    assert set(found.groups[0].device.peak_flops.values()) == {7e9}
    assert found.groups[0].device.memory_bytes == said.groups[0].device.memory_bytes
    assert found.origin is Origin.CALIBRATED
    assert "0:127.0.0.7 1:127.0.0.8" in found.groups[0].nic.sources
    assert found.groups[0].nic.bandwidth == document["pairs"][0]["bandwidth"]
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    assert "--seconds 6 --json" in (tmp_path / "asked").read_text()
    assert "127.0.0.7: devices are measured" in told.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--across", "ssh:one", "--devices", "2"], "--devices"),
        (["--python", "python3"], "--python"),
        (["--across", EXAMPLE, "--python", "python3"], "--python"),
        (["--across", "ssh:no.such.host."], "no.such.host."),
        (["--across", "ssh:,"], "no host is named"),
    ],
)
def test_what_cannot_be_measured_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "measure", *words]) in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
    assert told in capsys.readouterr().err


@makes_labs
def test_devices_that_this_machine_lends_to_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "measure", "--across", "16xH100"]) == ExitCode.USAGE
    assert "made of this machine's processors" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@makes_labs
def test_the_example_is_measured_as_it_is_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "found.json"
    assert main(["cluster", "measure", "--across", EXAMPLE, "--seconds", "10", "--out", str(out)]) == 0
    found = catalog.load_cluster(str(out))
    near, far = found.groups
    assert [(group.num_nodes, group.site, group.device.name) for group in found.groups] == [
        (2, "island0", "near-core"),
        (2, "island1", "far-core"),
    ]
    assert near.device.attention_rates
    assert far.device.attention_rates
    assert max(near.device.peak_flops.values()) > 1.4 * max(far.device.peak_flops.values())
    assert found.wide_area is not None
    assert found.wide_area.bandwidth < 1.1 * 12.5e6
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(sshd_here.why_not()), reason=sshd_here.why_not())
def test_hosts_over_ssh_itself_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, out = tmp_path / "python", tmp_path / "found.json"
    kept = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')} MESHWRIGHT_CACHE={tmp_path}"
    python.write_text(f'#!/bin/sh\nexec env {kept} {sys.executable} "$@"\n')
    python.chmod(0o755)
    with sshd_here.real(tmp_path / "ssh") as reached:
        monkeypatch.setenv("PATH", f"{reached}:{os.environ['PATH']}")
        words = ["cluster", "measure", "--across", "ssh:first,second", "--seconds", "5", "--python", str(python)]
        assert main([*words, "--out", str(out)]) == 0
    (group,) = catalog.load_cluster(str(out)).groups
    assert group.num_nodes == 2
    assert group.device.kind is DeviceKind.CPU
    assert group.device.attention_rates
    assert group.nic.bandwidth > 1e7
