"""How long workers are stopped: not while they run between two looks, nor while nobody looks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from meshwright.run.elastic.halted import Halted, is_stopped


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
