"""The worker under torchrun itself, with two agents as two nodes have."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.run.files import write_json
from meshwright.run.train import train
from meshwright.spec.plan import Sharding
from meshwright.train.observe.timekeeper import goodput_of
from tests.run.runs import BATCH, design, losses
from tests.support.designs import Layout

STEPS = 4


def two_agents(run_dir: Path) -> list[tuple[int, str]]:
    """Exit codes and output of two torchrun agents with one worker each, which meet at a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost"]
    command += ["-m", "meshwright.run.worker", str(run_dir)]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [agent.communicate(timeout=180)[0] for agent in agents]
    return [(agent.returncode, text) for agent, text in zip(agents, said, strict=True)]


@pytest.mark.slow
def test_two_nodes_train_what_one_does_and_leave_the_same_files(tmp_path: Path) -> None:
    made = design(tmp_path, Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS), steps=STEPS)
    train(made, run_dir=tmp_path / "one", say=str.strip)
    (tmp_path / "two").mkdir()
    write_json(tmp_path / "two" / "design.json", made)
    assert [code for code, _ in two_agents(tmp_path / "two")] == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    kept = goodput_of(tmp_path / "two")
    assert kept is not None
    assert (kept.launches, kept.steps, kept.failures) == (1, STEPS, 0)
    for name in ("predicted.json", "environment.json", "tokenizer.json", "summary.json"):
        assert (tmp_path / "two" / name).stat().st_size > 0


@pytest.mark.slow
def test_a_mistake_is_told_in_words_by_torchrun_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ended = two_agents(tmp_path / "run")
    for code, said in ended:
        assert code != 0
        assert "worker.py" not in said
    # One agent may learn that the other is gone before its own worker has said why.
    told = [f"{tmp_path / 'run' / 'design.json'}: there is no such file" in said for _, said in ended]
    assert any(told)
    assert all(says or "RendezvousConnectionError" in said for says, (_, said) in zip(told, ended, strict=True))
