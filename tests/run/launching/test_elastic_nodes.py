"""Elastic runs over several nodes: a node is lost at once, be it the one that leads, and taken in again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshwright.lab import Lab, Topology, Uplink
from meshwright.lab.fabric import unfit
from meshwright.run.audit import audit
from meshwright.run.launch import WORKER_MODULE
from meshwright.run.launching.command import node_command
from meshwright.run.train import train
from meshwright.search.check import check
from meshwright.search.decide import RUNTIME
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ExitCode
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec, SyncKind, usual_rounds
from tests.run.elastic_runs import elastic, epochs, until, until_step
from tests.run.launching.test_node import ended, head
from tests.run.runs import design, losses, rows
from tests.support.designs import Layout

BATCH = 12
NODES, EACH = 2, 2
SHARDS = Layout(shard=4, sharding=Sharding.PARAMETERS, batch=BATCH)


def over_nodes(folder: Path, layout: Layout = SHARDS, *, nodes: int = NODES, fewest: int = 1, **changes: Any) -> Design:
    made = calm(elastic(folder, layout, steps=5000, fewest=fewest, **changes))
    (group,) = made.cluster.groups
    group = replace(group, num_nodes=nodes, devices_per_node=layout.ranks // nodes)
    return replace(made, cluster=replace(made.cluster, groups=(group,)))


def calm(made: Design) -> Design:
    """At a rate at which rounding does not grow while others wait for a node to start."""
    return replace(made, job=replace(made.job, optimizer=replace(made.job.optimizer, learning_rate=1e-4)))


def node(
    run: Path, number: int, *, at: str, design_file: Path | None = None, nodes: int = NODES, enter: Sequence[str] = ()
) -> subprocess.Popen[str]:
    command = node_command(
        run,
        python=sys.executable,
        node=str(number),
        nodes=str(nodes),
        head=at,
        session="s",
        design="" if design_file is None else str(design_file),
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*enter, *command], stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def workers(started: subprocess.Popen[str]) -> dict[str, int]:
    """Of a node, by name."""
    lines = {child.pid: child.cmdline() for child in psutil.Process(started.pid).children()}
    return {line[line.index("--member") + 1]: pid for pid, line in lines.items() if WORKER_MODULE in line}


def lose(started: subprocess.Popen[str]) -> None:
    """The node and all that runs on it are gone at once."""
    processes = [started.pid, *(child.pid for child in psutil.Process(started.pid).children(recursive=True))]
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    started.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [0, 1], ids=["leads", "follows"])
def test_a_run_goes_on_without_a_node_and_takes_it_in_again(lost: int, tmp_path: Path) -> None:
    run, at = tmp_path / "run", head()
    (tmp_path / "design.json").write_text(over_nodes(tmp_path).to_json())
    started = [node(run, number, at=at, design_file=tmp_path / "design.json") for number in range(NODES)]
    kept = 1 - lost
    try:
        until_step(run, 5)
        before = workers(started[kept])
        lose(started[lost])
        until(lambda: len(epochs(run)) == 2)
        until_step(run, max(losses(run)) + 5)
        started[lost] = node(run, lost, at=at)
        until(lambda: len(epochs(run)[-1]["members"]) == NODES * EACH)
        until_step(run, max(losses(run)) + 5)
        assert workers(started[kept]) == before, "no survivor was started again"
        started[kept].send_signal(signal.SIGTERM)
        codes, said = ended(started)
    finally:
        for each in started:
            if each.poll() is None:
                lose(each)
    assert codes == [ExitCode.SAVED, ExitCode.SAVED], said
    first, without, back = epochs(run)
    assert [len(first["homes"]), len(without["homes"]), len(back["homes"])] == [2, 1, 2]
    assert without["why"].startswith(f"node {lost}")
    assert without["why"].endswith("was lost")
    assert without["source"] is not None, "the other node had copies of all"
    assert without["undone_steps"] <= 1
    assert back["plan"] == first["plan"]
    is_as_undisturbed(run, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "kind", "lost"),
    [
        (Layout(replicate=4, batch=BATCH), SyncKind.STREAMING, 0),
        (Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=BATCH), SyncKind.DILOCO, 1),
    ],
    ids=["two on each, the node that leads", "one on each, the node that follows"],
)
def test_learners_go_on_without_those_of_a_node_and_take_them_in_again(
    layout: Layout, kind: SyncKind, lost: int, tmp_path: Path
) -> None:
    run, at = tmp_path / "run", head()
    made = over_nodes(tmp_path, layout, fewest=2, synchronize=SynchronizeSpec(kinds=(kind,), every=6))
    rounds = usual_rounds(kind, every=6, learners=layout.replicate, precision=Precision.FP64)
    made = replace(made, plan=replace(made.plan, gradients=GradientSync(kind=kind, rounds=rounds)))
    assert check(made, scopes=RUNTIME) == ()
    (tmp_path / "design.json").write_text(made.to_json())
    started = [node(run, number, at=at, design_file=tmp_path / "design.json") for number in range(NODES)]
    kept = 1 - lost
    try:
        until_step(run, 9)
        before = workers(started[kept])
        lose(started[lost])
        until(lambda: len(epochs(run)) == 2)
        until_step(run, max(losses(run)) + 9)
        started[lost] = node(run, lost, at=at)
        until(lambda: len(epochs(run)[-1]["members"]) == NODES * EACH)
        until_step(run, max(losses(run)) + 9)
        assert workers(started[kept]) == before, "no survivor was started again"
        started[kept].send_signal(signal.SIGTERM)
        codes, said = ended(started)
    finally:
        for each in started:
            if each.poll() is None:
                lose(each)
    assert codes == [ExitCode.SAVED, ExitCode.SAVED], said
    _, without, *_, back = epochs(run)
    assert without["why"].startswith(f"node {lost}")
    assert without["source"] is not None, "what all learners go from is on each"
    assert back["source"]["step"] % rounds.every == 0, "they are taken in at the end of a round"
    assert back["undone_steps"] == 0
    steps = max(losses(run))
    assert sorted(losses(run)) == list(range(1, steps + 1))
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())
    regrouped = [row for row in rows(run) if "regroup_seconds" in row]
    assert regrouped[0]["learners"] == layout.replicate / NODES
    assert regrouped[-1]["learners"] == layout.replicate
    assert found.dropped == sum(row["dropped_sequences"] for row in regrouped)


def is_as_undisturbed(run: Path, folder: Path) -> None:
    """Every step was done once, with the losses of one device, and every sequence read once."""
    steps = max(losses(run))
    assert sorted(losses(run)) == list(range(1, steps + 1))
    train(calm(design(folder, Layout(batch=BATCH), steps=steps)), run_dir=folder / "alone", say=str.strip)
    expected = losses(folder / "alone")
    assert all(abs(loss - expected[step]) <= 1e-9 * abs(expected[step]) for step, loss in losses(run).items())
    found = audit(run, cache=folder / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())


WHY_NO_LAB = unfit()
THREE = Topology(
    hosts=("host0", "host1", "host2"),
    shares=(1 / 3, 1 / 3, 1 / 3),
    uplinks=tuple(Uplink(below=f"host{place}", above="core", bandwidth=125e6) for place in range(3)),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NO_LAB), reason=WHY_NO_LAB)
def test_nodes_go_on_without_the_one_that_leads_and_is_cut_off(tmp_path: Path) -> None:
    """Nothing tells the others that it is gone, and it lives: it ends by itself, for it has too few ranks."""
    layout = Layout(shard=3, sharding=Sharding.PARAMETERS, batch=BATCH)
    made = over_nodes(tmp_path, layout, nodes=3, fewest=2, peer_timeout_seconds=120.0)
    run = cut_off_first(tmp_path, made)
    is_as_undisturbed(run, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NO_LAB), reason=WHY_NO_LAB)
def test_learners_go_on_without_one_whose_cable_is_pulled_in_the_middle_of_a_round(tmp_path: Path) -> None:
    """What it learnt since it met the others is dropped, and what they had sent it is waited for no longer."""
    layout, kind = Layout(replicate=3, batch=BATCH), SyncKind.STREAMING
    spec = SynchronizeSpec(kinds=(kind,), every=6)
    made = over_nodes(tmp_path, layout, nodes=3, fewest=2, peer_timeout_seconds=120.0, synchronize=spec)
    rounds = usual_rounds(kind, every=6, learners=3, precision=Precision.FP64)
    made = replace(made, plan=replace(made.plan, gradients=GradientSync(kind=kind, rounds=rounds)))
    run = cut_off_first(tmp_path, made, after=9)
    steps = max(losses(run))
    assert sorted(losses(run)) == list(range(1, steps + 1))
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())
    (regrouped,) = [row for row in rows(run) if "regroup_seconds" in row]
    assert regrouped["learners"] == 2
    assert found.dropped == regrouped["dropped_sequences"] > 0


def cut_off_first(folder: Path, made: Design, *, after: int = 3) -> Path:
    """The run of `made` on three hosts, of which the first is cut off `after` so many steps and the others train on."""
    run = folder / "run"
    (folder / "design.json").write_text(made.to_json())
    with Lab.of(THREE) as found:
        lab = found.without_shares()
        at = f"{lab.hosts[0].address}:29500"
        started = [
            node(run, place, at=at, design_file=folder / "design.json", nodes=3, enter=host.enter)
            for place, host in enumerate(lab.hosts)
        ]
        try:
            until_step(run, after)
            found.pull(0)
            until(lambda: len(epochs(run)) == 2)
            until_step(run, max(losses(run)) + 3)
            assert started[0].wait(120) == ExitCode.WORKER
            started[2].send_signal(signal.SIGTERM)
            codes, said = ended(started)
        finally:
            for each in started:
                if each.poll() is None:
                    lose(each)
    assert codes[1:] == [ExitCode.SAVED, ExitCode.SAVED], said
    assert "1 of 3 ranks are left, too few to go on" in said[0]
    assert [home["host"] for home in epochs(run)[1]["homes"]] == [1, 2]
    return run
