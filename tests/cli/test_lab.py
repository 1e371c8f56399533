"""`meshwright lab` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshwright import catalog
from meshwright.cli import main
from meshwright.spec.errors import ExitCode
from tests.lab.test_lab import WHY_NOT

EXAMPLE = str(Path(__file__).resolve().parent.parent.parent / "examples" / "lab" / "two-sites.toml")
makes_labs = pytest.mark.skipif(bool(WHY_NOT), reason=f"no lab can be made here: {WHY_NOT}")


@makes_labs
def test_the_example_has_the_links_that_it_asks_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    assert main(["lab", EXAMPLE, "--seconds", "0.3", "--json", "--out", str(written)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hosts"] == ["host0", "host1", "host2", "host3"]
    assert told["islands"] == [[0, 1], [2, 3]]
    far = [pair for pair in told["pairs"] if pair["asked_latency_seconds"]]
    assert len(far) == 4
    for pair in far:
        assert pair["bandwidth"] < 1.1 * pair["asked_bandwidth"]
        assert pair["latency_seconds"] >= pair["asked_latency_seconds"]

    found = catalog.load_cluster(str(written))
    assert [(group.num_nodes, group.site) for group in found.groups] == [(2, "island0"), (2, "island1")]
    assert [group.device.name for group in found.groups] == ["near-core", "far-core"]


@makes_labs
def test_a_command_runs_on_every_host_and_one_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", EXAMPLE, "--", "sh", "-c", "echo {host} of {hosts} at {first}; exit {host}"]) == ExitCode.WORKER
    lines = capsys.readouterr().out.splitlines()
    assert "host2 | 2 of 4 at 10.77.0.1" in lines
    assert [line.split()[1] for line in lines if line.startswith("host3 ")][-1] == "3"


@makes_labs
def test_what_asks_a_lab_to_end_leaves_none_of_its_commands(tmp_path: Path) -> None:
    beside, words = tmp_path / "pid", [sys.executable, "-m", "meshwright", "lab", EXAMPLE, "--"]
    with subprocess.Popen([*words, "sh", "-c", f"echo $$ >> {beside}; sleep 600"], stderr=subprocess.PIPE) as process:
        hosts = 4
        while len(beside.read_text().split() if beside.exists() else []) < hosts:
            assert process.poll() is None
            time.sleep(0.05)
        started = [psutil.Process(int(each)) for each in beside.read_text().split()]
        process.terminate()
        _, told = process.communicate(timeout=60)
    assert b"Traceback" not in told
    assert process.returncode
    assert not any(each.is_running() for each in started)


@pytest.mark.parametrize("words", [["ssh:localhost", "--loss", "0.1"], ["8xH100", "--out", "x.json", "--", "true"]])
def test_an_option_that_would_do_nothing_is_refused(words: list[str]) -> None:
    assert main(["lab", *words]) == ExitCode.USAGE


@pytest.mark.parametrize(
    ("where", "told"),
    [("ssh:", "ssh:ONE,TWO names two"), ("64xNothing", "Nothing"), ("ssh:no.such.host.", "cannot be entered over ssh")],
)
def test_what_is_no_lab_is_told(where: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", where, "--", "true"]) in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
    assert told in capsys.readouterr().err
