"""A rank that dies or stops where the others wait: they end in time, and say who, in what, and where in the step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.run.chaos.watch import is_alive
from meshwright.run.train import train
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.plan import Sharding
from tests.run.runs import BATCH, after_steps, design, worker_of
from tests.support.designs import Layout

PATIENCE = 10.0
SHARDED = Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS)
PIPELINED = Layout(batch=BATCH, pipeline=2)


def outcome(folder: Path, layout: Layout, act: Callable[[], None]) -> str:
    """What is told of a run of two ranks to which `act` is done after three steps."""
    run = folder / "run"
    entry = design(folder, layout, steps=5000, peer_timeout_seconds=PATIENCE)
    thread = after_steps(run, 3, act)
    with pytest.raises(WorkerFailed) as caught:
        train(entry, run_dir=run, say=lambda _line: None)
    thread.join()
    return str(caught.value)


@pytest.mark.parametrize("layout", [SHARDED, pytest.param(PIPELINED, marks=pytest.mark.slow)], ids=str)
def test_a_rank_that_stops_is_named_by_those_that_waited_for_it(layout: Layout, tmp_path: Path) -> None:
    took: list[float] = []

    def stop() -> None:
        begun, stopped, other = time.monotonic(), worker_of(1), worker_of(0)
        stopped.send_signal(signal.SIGSTOP)
        while other.is_running() and time.monotonic() - begun < 10 * PATIENCE:
            time.sleep(0.05)  # to wait for it would take its exit code from the launcher
        while is_alive(stopped) and time.monotonic() - begun < 10 * PATIENCE:
            time.sleep(0.05)
        took.append(time.monotonic() - begun)

    told = outcome(tmp_path, layout, stop)
    assert took[0] < 2 * PATIENCE
    assert "rank 1 did not come to where the others waited: hung or stopped" in told
    assert "rank 0 waited in " in told
    assert "of ranks 0 and 1 (step " in told
    assert "rank 1 was last seen in step " in told


def test_a_rank_that_dies_is_named_with_what_the_others_were_in(tmp_path: Path) -> None:
    told = outcome(tmp_path, SHARDED, lambda: worker_of(1).send_signal(signal.SIGKILL))
    assert "rank 1 was killed (signal 9)" in told
    assert "rank 0 waited in " in told
    assert "of ranks 0 and 1 (step " in told
