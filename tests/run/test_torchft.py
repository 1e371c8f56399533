"""Replicas that meet by torchft: the same losses whoever is lost, every sequence once, and no stranger's state."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from meshwright.run import preflight
from meshwright.run.audit import audit
from meshwright.run.handshake import Refused
from meshwright.run.train import train
from meshwright.spec.errors import EnvironmentUnfit, ExitCode
from meshwright.spec.job import ElasticBackend, ElasticSpec
from meshwright.spec.plan import Sharding
from meshwright.train.replicas import Handed
from tests.run.elastic_runs import epochs, member, until, until_step
from tests.run.runs import ask_to_stop, design, losses, rows
from tests.support.designs import Layout

BATCH = 12
REPLICAS = Layout(replicate=3, batch=BATCH)
SHARDS = Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=BATCH)
SPEC = ElasticSpec(min_ranks=1, backend=ElasticBackend.TORCHFT)


def listens(process: psutil.Process) -> set[str]:
    """Addresses that it listens at."""
    return {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}


def quiet(line: str) -> None:
    """Nobody watches a test."""


def test_a_job_for_torchft_where_it_is_not_installed_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = design(tmp_path, Layout(replicate=2, batch=BATCH), steps=4, elastic=SPEC)
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(EnvironmentUnfit, match="torchft is not installed") as caught:
        preflight.check_design(made)
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert 'pip install "meshwright[torchft]"' in str(caught.value)
    preflight.check_job(replace(made.job, elastic=replace(SPEC, backend=ElasticBackend.OWN)))


def _handed(scale: float) -> Handed:
    tensors = {
        "model.a": torch.arange(12, dtype=torch.float64).reshape(3, 4) * scale,
        "model.b": (torch.arange(5) * scale).to(torch.bfloat16),
        "optimizer.a.step": torch.tensor(7.0 * scale),
    }
    return Handed(tensors=tensors, progress={"step": 7, "ledger": {"read": "00"}})


def _transport(*, word: str, scale: float, said: list[str]) -> Any:
    transport = pytest.importorskip("meshwright.run.torchft.transport", exc_type=ImportError)
    return transport.Transport(word=word, like=lambda: _handed(scale).tensors, say=said.append)


def _told(scale: float) -> dict[str, Any]:
    return {"user": {"default": _handed(scale)}, "torchft": {"step": 9, "batches_committed": 3}}


def test_a_replica_takes_the_state_of_another() -> None:
    said: list[str] = []
    giver, taker = (_transport(word="word", scale=scale, said=said) for scale in (1.0, 0.0))
    giver.send_checkpoint([1], 9, _told(1.0), timedelta(seconds=5))
    got = taker.recv_checkpoint(0, giver.metadata(), 9, timedelta(seconds=5))
    handed, expected = got["user"]["default"], _handed(1.0)
    assert got["torchft"] == {"step": 9, "batches_committed": 3}
    assert handed.progress == expected.progress
    assert list(handed.tensors) == list(expected.tensors)
    assert all(torch.equal(handed.tensors[name], x) for name, x in expected.tensors.items())
    assert said == []
    giver.disallow_checkpoint()
    with pytest.raises(TimeoutError):
        taker.recv_checkpoint(0, giver.metadata(), 9, timedelta(seconds=0.3))
    for side in (giver, taker):
        side.shutdown()


def test_a_replica_gives_strangers_nothing_and_takes_nothing_else_than_it_holds() -> None:
    said: list[str] = []
    giver, stranger = (_transport(word=word, scale=1.0, said=said) for word in ("word", "another"))
    giver.send_checkpoint([1], 9, _told(1.0), timedelta(seconds=5))
    with pytest.raises(ConnectionError):
        stranger.recv_checkpoint(0, giver.metadata(), 9, timedelta(seconds=5))
    assert "it does not know the word" in said[0]
    other = _transport(word="word", scale=1.0, said=said)
    other._like = lambda: {"model.a": torch.zeros(3, 5, dtype=torch.float64)}
    with pytest.raises(Refused, match="is not of this model, plan and round"):
        other.recv_checkpoint(0, giver.metadata(), 9, timedelta(seconds=5))
    for side in (giver, stranger, other):
        side.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "replica"), [(REPLICAS, 0), (REPLICAS, 2), (SHARDS, 1)], ids=str)
def test_replicas_go_on_without_a_lost_one_and_take_it_in_again(layout: Layout, replica: int, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    run, pids, heard = tmp_path / "run", list[dict[str, int]](), set[str]()
    others = [f"{other}.0" for other in range(layout.replicate) if other != replica]

    def act() -> None:
        until_step(run, 6)
        pids.append({other: member(other).pid for other in others})
        heard.update(place for other in others for place in listens(member(other)))
        member(f"{replica}.0").kill()
        until(lambda: len(epochs(run)) >= 3)
        until_step(run, max(losses(run)) + 6)
        pids.append({other: member(other).pid for other in others})
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    outcome = train(design(tmp_path, layout, steps=5000, elastic=SPEC), run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    each = layout.shard
    assert [epoch["ranks"] for epoch in epochs(run)] == [
        count * each for count in (layout.replicate, layout.replicate - 1, layout.replicate)
    ]
    assert epochs(run)[1]["why"] == f"replica {replica} was lost"
    assert pids[0] == pids[1], "no survivor was started again"
    assert heard == {"127.0.0.1"}
    steps = outcome.ended.step
    assert sorted(losses(run)) == list(range(1, steps + 1))
    train(design(tmp_path, Layout(batch=BATCH), steps=steps), run_dir=tmp_path / "alone", say=quiet)
    expected = losses(tmp_path / "alone")
    assert all(abs(loss - expected[step]) <= 1e-9 * abs(expected[step]) for step, loss in losses(run).items())
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())
    assert [row["ranks"] for row in rows(run) if "regroup_seconds" in row] == [layout.replicate - 1, layout.replicate]
    assert not any("--replica" in child.cmdline() for child in psutil.Process().children())


@pytest.mark.slow
def test_a_replica_that_hangs_is_ended_and_started_again_and_the_run_goes_on_later(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    run, said = tmp_path / "run", list[str]()

    def act() -> None:
        until_step(run, 6)
        member("1.0").suspend()
        until(lambda: len(epochs(run)) >= 3)
        until_step(run, max(losses(run)) + 6)
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    made = design(tmp_path, Layout(replicate=2, batch=BATCH), steps=50000, elastic=SPEC, peer_timeout_seconds=6.0)
    outcome = train(made, run_dir=run, say=said.append)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert [epoch["ranks"] for epoch in epochs(run)] == [2, 1, 2]
    assert any("replica 1 has not come back: it hung or was stopped, and is ended" in line for line in said)
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (outcome.ended.step * BATCH, ())
    again = train(made, run_dir=run, resume=True, steps=5, say=quiet)
    assert again.ended.step == outcome.ended.step + 5
    assert sorted(losses(run)) == list(range(1, again.ended.step + 1))
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (again.ended.step * BATCH, ())
