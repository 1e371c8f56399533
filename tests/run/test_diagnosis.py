"""Runs of two real ranks of which one is slow, hangs in a call, or calls another collective than its peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.report import diagnose
from meshwright.run import failure
from meshwright.run.launch import launch
from meshwright.run.train import train
from meshwright.spec.goodput import Moment, Spent, account
from meshwright.spec.incident import Trouble
from meshwright.spec.plan import Sharding
from meshwright.train.observe.inquest import Inquest, inquest, stood_in
from meshwright.train.observe.timekeeper import marks_of
from tests.run.runs import BATCH, after_steps, ask_to_stop, design, worker_of
from tests.support.designs import Layout

SHARDED = Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS)


def astray(run_dir: Path, manner: str) -> Inquest:
    """What two workers leave behind of which rank 1 goes astray."""
    launched = launch(run_dir, ranks=[0, 1], arguments=[manner], say=lambda _line: None, module="tests.run.hang_worker")
    assert launched.failures
    return inquest(run_dir)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_where_it_stands(tmp_path: Path) -> None:
    found = astray(tmp_path, "hang")
    assert found.suspects == (1,)
    waited, stood = found.sentences
    assert "rank 1 kept others waiting in step 2: rank 0 waited for it in all_reduce 2 of ranks 0 and 1" in waited
    assert "it came out of all_reduce 1 last" in waited
    assert stood.startswith("rank 1 stood in read_for_ever (hang_worker.py:")


@pytest.mark.slow
def test_ranks_that_all_read_from_what_does_not_answer_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data")
    said, patience = list[str](), 4.0
    launched = launch(
        tmp_path,
        ranks=[0, 1],
        arguments=["read"],
        say=said.append,
        module="tests.run.hang_worker",
        patience_seconds=patience,
    )
    assert launched.failures
    assert sorted(each.rank for each in launched.stood) == [0, 1]
    assert all(patience < each.seconds < patience + 3.0 for each in launched.stood)
    assert said[0].startswith("ranks 0 and 1 stood still in step 2, reading data for ")
    places = stood_in(tmp_path, [0, 1])
    assert [place.partition(" (")[0] for place in places] == ["rank 0 stood in open", "rank 1 stood in open"]
    told = failure.told(
        failure.read(launched.failures, ended=launched.ended),
        predicted_bytes=1.0,
        machine_bytes=2.0,
        num_ranks=2,
        found=places,
        stood=launched.stood,
    )
    assert str(told).startswith("ranks 0 and 1 stood still in step 2, reading data")
    assert "called by read_what_does_not_answer (hang_worker.py:" in str(told)


@pytest.mark.slow
def test_ranks_that_go_apart_are_named_with_both_collectives(tmp_path: Path) -> None:
    (first, *_) = astray(tmp_path, "apart").sentences
    assert first == (
        "desynchronised in collective 2 of ranks 0 and 1, step 2: rank 0 entered all_reduce of 4 KiB where rank 1 "
        "entered broadcast of 64 B"
    )


@pytest.mark.slow
def test_a_launcher_that_is_killed_is_told_by_its_workers(tmp_path: Path) -> None:
    """They save and end well, and nobody asked them to."""
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    plan.write_text(design(tmp_path, SHARDED, steps=100_000).to_json())
    command = [sys.executable, "-m", "meshwright", "train", str(plan), "--run", str(run)]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    after_steps(run, 4, launcher.kill).join()
    launcher.wait()
    ended, end = [], time.monotonic() + 60.0
    while not ended and time.monotonic() < end:
        time.sleep(0.1)
        ended = [mark for mark in marks_of(run) if mark.what is Moment.ENDED]
    found = diagnose(run)
    assert found.state.startswith("failed: the process that started the workers is gone")
    assert not found.healthy
    assert f"they saved step {ended[0].step:,} and ended" in found.state
    (launch,) = [mark for mark in marks_of(run) if mark.what is Moment.LAUNCHED]
    again = account([*marks_of(run), replace(launch, at=ended[0].at + 9.0)])
    assert again is not None
    assert (again.failures, again.seconds[Spent.DOWN], again.seconds[Spent.ASLEEP]) == (1, 9.0, 0.0)


@pytest.mark.slow
def test_a_rank_that_runs_a_part_of_the_time_is_told_as_slow(tmp_path: Path) -> None:
    """Rank 1 is stopped for two fifths of every thirty milliseconds, for which its peer waits in every step."""
    run, over = tmp_path / "run", threading.Event()

    def slow_down() -> None:
        worker = worker_of(1)
        while not over.is_set():
            worker.send_signal(signal.SIGSTOP)
            time.sleep(0.012)
            worker.send_signal(signal.SIGCONT)
            time.sleep(0.018)

    def end() -> None:
        over.set()
        ask_to_stop()

    threads = [after_steps(run, 40, slow_down), after_steps(run, 120, end)]
    try:
        train(design(tmp_path, SHARDED, steps=5000), run_dir=run, say=lambda _line: None)
    finally:
        over.set()
    for thread in threads:
        thread.join()
    (found, *_) = diagnose(run).incidents
    assert (found.trouble, found.ranks) == (Trouble.RANK, (1,))
    assert found.ratio > 1.2
    assert 40 < found.begun <= 80
