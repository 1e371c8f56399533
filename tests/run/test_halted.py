"""How long workers are stopped: not while they run, nor while nobody looks. Those that others wait for are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.run.elastic.board import Board
from meshwright.run.elastic.halted import Halted, is_stopped
from meshwright.run.elastic.warden import Warden
from tests.run.pretended import FIRST, crew_of, leave, warden


class Clock:
    """Tells the time that a test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Looked:
    """A worker that works, and how long it is stopped by the clock of a test."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.clock = process, Clock()
        self.halted = Halted(clock=self.clock)

    def after(self, seconds: float) -> float | None:
        self.clock.now += seconds
        return self.halted.look({"1.0": self.process}).get("1.0")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        end = time.monotonic() + 10.0
        while is_stopped(self.process) != (number is signal.SIGSTOP):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def looked() -> Iterator[Looked]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield Looked(psutil.Process(process.pid))
        process.kill()


def test_the_seconds_of_one_that_is_stopped_are_counted_from_the_first_look(looked: Looked) -> None:
    assert looked.after(1.0) is None
    looked.send(signal.SIGSTOP)
    assert [looked.after(0.5) for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    looked.send(signal.SIGCONT)
    assert looked.after(0.5) is None


def test_one_that_works_between_two_looks_begins_anew(looked: Looked) -> None:
    """As one that is made slow, which is stopped for a part of every moment."""
    looked.send(signal.SIGSTOP)
    for _ in range(3):
        looked.after(0.5)
        looked.send(signal.SIGCONT)
        time.sleep(0.1)
        looked.send(signal.SIGSTOP)
        assert looked.after(0.5) == 0.0


def test_while_nobody_looks_and_while_nobody_waits_no_time_passes(looked: Looked) -> None:
    """A launcher that was suspended with its workers may go on before they do."""
    looked.send(signal.SIGSTOP)
    assert [looked.after(0.5), looked.after(3600.0)] == [0.0, 2.0]
    looked.halted.forget()
    assert looked.after(0.5) == 0.0


def test_one_that_has_ended_is_not_stopped(looked: Looked) -> None:
    looked.send(signal.SIGSTOP)
    looked.process.kill()
    looked.process.wait()
    assert looked.after(0.5) is None


@pytest.fixture
def board() -> Board:
    return Board.host(word="the word", say=str.strip)


def come(made: Warden, name: str) -> None:
    """The worker has come into the epoch, and waits for the others."""
    made.board.tell(f"here/{made.epoch.number}/{name}", "")


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def impatient(board: Board, tmp_path: Path, stopped: subprocess.Popen[bytes]) -> Warden:
    """One that gives a worker a second, and whose worker 2.0 is stopped."""
    made = warden(board, tmp_path)
    made.hung.patience_seconds = 1.0
    board.register("2.0", pid=stopped.pid)
    return made


def look_for(made: Warden, seconds: float, *, until: Callable[[], bool]) -> bool:
    """Whether that came about within so many seconds of looking."""
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        made.look()
        time.sleep(made.pause_seconds)
    return until()


def test_one_that_is_stopped_is_ended_where_all_others_are_gone(
    impatient: Warden, board: Board, stopped: subprocess.Popen[bytes]
) -> None:
    for name in FIRST:
        come(impatient, name)
    board.note_at_work(0)
    assert not look_for(impatient, 2.0, until=lambda: stopped.poll() is not None), "nobody has waited for it yet"
    for name in ("0.0", "1.0", "3.0"):
        crew_of(impatient).fails(name)
    assert look_for(impatient, 2.5, until=lambda: stopped.poll() is not None)
    assert impatient.hung.found["2.0"].startswith("rank 2 was stopped for 1")


def test_one_that_is_stopped_while_an_epoch_forms_is_ended(impatient: Warden, stopped: subprocess.Popen[bytes]) -> None:
    assert not look_for(impatient, 2.0, until=lambda: stopped.poll() is not None), "none of the others has come"
    come(impatient, "0.0")
    assert look_for(impatient, 2.5, until=lambda: stopped.poll() is not None)
    crew_of(impatient).fails("2.0")
    leave(impatient, "0.0", "1.0", "3.0", newest=3)
    impatient.look()
    assert impatient.epoch.members == ("0.0", "1.0", "3.0")
    assert impatient.epoch.why.startswith("rank 2 was stopped for 1")


def test_workers_that_are_all_stopped_wait_for_nobody(
    board: Board, tmp_path: Path, stopped: subprocess.Popen[bytes]
) -> None:
    made = warden(board, tmp_path)
    made.hung.patience_seconds = 0.5
    for name in FIRST:
        board.register(name, pid=stopped.pid)
        come(made, name)
    assert not look_for(made, 2.0, until=lambda: stopped.poll() is not None)
