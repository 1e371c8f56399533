"""Nodes of one run: what each is told it is, and a run over two of them that is stopped and gone on with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.run.files import write_json
from meshwright.run.launching import node
from meshwright.run.launching.command import node_command
from meshwright.run.train import train
from meshwright.spec.errors import ConfigError, ExitCode
from meshwright.spec.plan import Design
from meshwright.train.observe.timekeeper import goodput_of
from tests.run.launching import sshd_here
from tests.run.launching.made import NODES, on_processors
from tests.run.runs import after_steps, ask_to_stop, done, losses, rows

STEPS = 6


def head() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_node_s_number_is_said_or_in_a_variable() -> None:
    assert node.number_in("3", {}) == 3
    assert node.number_in("SLURM_NODEID", {"SLURM_NODEID": "12"}) == 12
    with pytest.raises(ConfigError, match="SLURM_NODEID is not set"):
        node.number_in("SLURM_NODEID", {})
    with pytest.raises(ConfigError, match="RANK is 'one'"):
        node.number_in("RANK", {"RANK": "one"})


@pytest.mark.parametrize(
    ("nodes", "says"),
    [("1", "this is node 0 of 1 and the plan lies on 2; start 2 nodes"), ("many", "this node has no number")],
)
def test_nodes_that_the_plan_does_not_lie_on_are_told(
    nodes: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "design.json", on_processors(tmp_path))
    words = [str(tmp_path), "--node", "0", "--nodes", nodes, "--head", head(), "--session", "s"]
    assert node.main(words) in (ExitCode.ENVIRONMENT, ExitCode.USAGE)
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_a_run_that_would_lose_steps_unsaid_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = on_processors(tmp_path)
    (group,) = made.cluster.groups
    one = replace(made.cluster, groups=(replace(group, num_nodes=1, devices_per_node=2),))
    write_json(tmp_path / "design.json", replace(made, cluster=one))
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002" / "COMMITTED").touch()
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "loss": 1.0}) + "\n")
    words = [str(tmp_path), "--node", "0", "--nodes", "1", "--head", head(), "--session", "s"]
    assert node.main(words) == ExitCode.ENVIRONMENT
    assert "the run reached step 2 and no complete checkpoint of it is left" in capsys.readouterr().err


def test_a_node_leaves_a_run_that_is_done_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = on_processors(tmp_path)
    run, other = tmp_path / "run", tmp_path / "other.json"
    done(run, made)
    other.write_text(placed(made).to_json())
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for begin_with in ([], ["--design", str(other)]):
        words = [str(run), "--node", "0", "--nodes", "2", "--head", head(), "--session", "s", *begin_with]
        assert node.main(words) == ExitCode.OK
        assert "steps are done and none is left to train" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def nodes(
    run_dir: Path, *, designs: tuple[Path, ...] = (), seconds: float | None = None
) -> list[subprocess.Popen[str]]:
    """Both nodes of a run, which meet at a free port; the first begins it with the first of `designs`."""
    at, given = head(), [*map(str, designs), *[""] * NODES]
    started = []
    for number in range(NODES):
        command = node_command(
            run_dir,
            python=sys.executable,
            node="NODE",
            nodes=str(NODES),
            head=at,
            session="s",
            design=given[number],
            stop_after=seconds,
        )
        environment = {**os.environ, "NODE": str(number)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    return started


def ended(started: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    said = [each.communicate(timeout=180)[0] for each in started]
    return [each.returncode for each in started], said


def placed(made: Design) -> Design:
    """The same with its ranks the other way about, so that rank 0 lies on the second node."""
    return replace(made, plan=replace(made.plan, placement=(1, 0)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_that_are_stopped_go_on_bit_by_bit(tmp_path: Path) -> None:
    made = placed(on_processors(tmp_path, steps=STEPS))
    train(made, run_dir=tmp_path / "one", say=str.strip)
    run = tmp_path / "two"
    (tmp_path / "design.json").write_text(made.to_json())
    first = nodes(run, designs=(tmp_path / "design.json",) * NODES)
    stop = after_steps(run, 2, lambda: first[0].send_signal(signal.SIGUSR1))
    codes, said = ended(first)
    stop.join()
    assert codes == [ExitCode.SAVED, ExitCode.SAVED], said
    assert "SIGUSR1: the workers finish this step and save" in said[0]
    assert "is saved; starting this again goes on" in said[1]
    assert 2 <= len(losses(run)) < STEPS
    codes, said = ended(nodes(run))
    assert codes == [ExitCode.OK, ExitCode.OK], said
    assert losses(run) == losses(tmp_path / "one")
    kept = goodput_of(run)
    assert kept is not None
    assert (kept.launches, kept.steps, kept.failures) == (2, STEPS, 0)
    assert not (run / "logs" / "node-0").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_stop_before_their_time_is_over_and_differ_in_words(tmp_path: Path) -> None:
    made = on_processors(tmp_path, steps=1000)
    run = tmp_path / "run"
    (tmp_path / "design.json").write_text(made.to_json())
    codes, said = ended(nodes(run, designs=(tmp_path / "design.json",) * NODES, seconds=1.0))
    assert codes == [ExitCode.SAVED, ExitCode.SAVED], said
    assert 1 <= len(rows(run)) < 1000
    other = tmp_path / "other.json"
    other.write_text(replace(made, job=replace(made.job, seed=9)).to_json())
    codes, said = ended(nodes(run, designs=(tmp_path / "design.json", other)))
    assert codes == [ExitCode.ENVIRONMENT, ExitCode.ENVIRONMENT]
    assert all("node 1 (" in text and "reads another design" in text for text in said)


WHY_NO_SSHD = sshd_here.why_not()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sort", ["pretended", pytest.param("real", marks=pytest.mark.skipif(bool(WHY_NO_SSHD), reason=WHY_NO_SSHD))]
)
def test_hosts_over_ssh_train_save_when_asked_and_go_on(
    sort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = on_processors(tmp_path, steps=STEPS)
    plan, run, python = tmp_path / "plan.json", tmp_path / "run", tmp_path / "python"
    plan.write_text(made.to_json())
    kept = {name: os.environ.get(name, "") for name in ("PYTHONPATH", "MESHWRIGHT_CACHE", "OMP_NUM_THREADS")}
    told = " ".join(f"{name}={value}" for name, value in kept.items() if value)
    python.write_text(f'#!/bin/sh\nexec env {told} {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = tmp_path / "ssh"
    words = ["launch", str(plan), "--on", "ssh", "--run", str(run), "--hosts", "first,second", "--submit"]
    words += ["--python", str(python), *(["--address", "127.0.0.1"] if sort == "pretended" else [])]
    with sshd_here.real(folder) if sort == "real" else nullcontext(None) as reached:
        monkeypatch.setenv("PATH", f"{reached or sshd_here.pretended(folder)}:{os.environ['PATH']}")
        stop = after_steps(run, 2, ask_to_stop)
        assert main(words) == ExitCode.SAVED, capsys.readouterr().err
        stop.join()
        assert 2 <= len(losses(run)) < STEPS
        assert main([*words, "--resume"]) == ExitCode.OK, capsys.readouterr().err
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert "first | " in capsys.readouterr().out
    assert (run / "logs" / "node-0-first.log").stat().st_size > 0
