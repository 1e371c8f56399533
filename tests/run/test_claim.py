"""A run directory is trained by one launch at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.run.claim import claimed
from meshwright.spec.errors import ConfigError, EnvironmentUnfit

HOLDER = """
import sys, time
from pathlib import Path
from meshwright.run.claim import claimed
with claimed(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_second_launch_is_refused_and_told_whose_the_run_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(run), pytest.raises(ConfigError, match=rf"goes on already.*process {os.getpid()} on "), claimed(run):
        pytest.fail("it was claimed twice")
    with claimed(run), claimed(run, node=1):
        assert (run / "claim-0").is_file()


def test_a_launch_that_was_killed_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mine\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on "), claimed(tmp_path):
            pytest.fail("another process has it")
        holder.kill()
        holder.wait()
    with claimed(tmp_path):
        assert (tmp_path / "claim-0").read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_is_deleted_and_made_again_is_claimed_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(run, end=lambda: pytest.fail("nobody else has it")):
        shutil.rmtree(run)
        run.mkdir()
        _wait_for(lambda: (run / "claim-0").is_file() and bool((run / "claim-0").read_text()))
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on "), claimed(run):
            pytest.fail("it was claimed twice")


def test_a_folder_that_is_moved_away_and_put_back_stays_claimed(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    with claimed(run, end=lambda: pytest.fail("nobody else has it")) as claim:
        run.rename(away)
        run.mkdir()
        _wait_for(lambda: (run / "claim-0").is_file())
        shutil.rmtree(run)
        away.rename(run)
        time.sleep(0.2)
        claim.take_again()
        with pytest.raises(ConfigError, match="goes on already"), claimed(run):
            pytest.fail("it was claimed twice")


def test_a_launch_ends_where_another_one_has_its_folder_since(tmp_path: Path) -> None:
    run, ended = tmp_path / "run", threading.Event()
    told = "another launch has this directory now, and this one was stopped.*made again, and process "
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "other")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mine\n"
        with pytest.raises(EnvironmentUnfit, match=told):
            _overtaken(run, by=tmp_path / "other", ended=ended)
        holder.kill()


def _overtaken(run: Path, *, by: Path, ended: threading.Event) -> None:
    with claimed(run, end=ended.set):
        run.rename(run.with_name("away"))
        by.rename(run)
        assert ended.wait(30.0)


def _wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
