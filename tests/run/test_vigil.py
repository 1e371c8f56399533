"""Who stands still is told from those who work, who wait for others and who are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.run.vigil import Vigil, stood_still
from meshwright.train.observe.collective_log import CollectiveLog, Group
from meshwright.train.observe.whereabouts import Section, path_of

PATIENCE = 10.0
SLEEPS, WORKS = "import time; time.sleep(600)", "while True: pass"


class Clock:
    """Tells the time that a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A rank with a process that sleeps, or works, and the vigil over it."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes], *, alone: bool) -> None:
        self.run_dir, self.process, self.clock = run_dir, psutil.Process(process.pid), Clock()
        self.vigil = Vigil(run_dir, patience_seconds=PATIENCE, alone=alone, clock=self.clock)
        self._marks = 0

    def mark(self, section: Section, *, step: int = 3) -> None:
        self._marks += 1
        path = path_of(self.run_dir, 0)
        path.parent.mkdir(exist_ok=True)
        told = {"step": step, "section": section.value, "process": self.process.pid, "at": float(self._marks)}
        path.write_text(json.dumps(told))

    def until_told(self, *, most: float, each: float = 1.0) -> float | None:
        """The seconds after which it is told to stand still; None where it is not."""
        began = self.clock.now
        while self.clock.now - began < most:
            self.clock.now += each
            if self.vigil.look({0: self.process}):
                return self.clock.now - began
        return None


@pytest.fixture
def sleeps() -> Iterator[subprocess.Popen[bytes]]:
    yield from _running(SLEEPS)


@pytest.fixture
def works() -> Iterator[subprocess.Popen[bytes]]:
    yield from _running(WORKS)


def _running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(0.2)
    yield process
    process.kill()
    process.wait()


def test_a_rank_that_reads_for_ever_stands_still(tmp_path: Path, sleeps: subprocess.Popen[bytes]) -> None:
    watched = Watched(tmp_path, sleeps, alone=False)
    watched.mark(Section.INPUT)
    found = watched.until_told(most=100.0)
    assert found is not None
    assert PATIENCE < found <= PATIENCE + 3.0
    watched.clock.now += 1.0
    (stood,) = watched.vigil.look({0: watched.process})
    assert (stood.rank, stood.seen.section) == (0, Section.INPUT)
    assert stood_still([stood]).what.startswith("rank 0 stood still in step 3, reading data for 13.0 s")


@pytest.mark.parametrize(
    ("section", "alone", "least"),
    [
        (Section.MODEL, True, PATIENCE),
        (Section.MODEL, False, 2 * PATIENCE),
        (Section.EVALUATE, False, 2 * PATIENCE),
        (Section.BUILD, True, 1800.0),
        (Section.SAVE, False, 1800.0),
    ],
)
def test_limits_are_of_what_a_rank_is_at(
    section: Section, alone: bool, least: float, tmp_path: Path, sleeps: subprocess.Popen[bytes]
) -> None:
    watched = Watched(tmp_path, sleeps, alone=alone)
    watched.mark(section)
    found = watched.until_told(most=4000.0)
    assert found is not None
    assert least < found <= 1.01 * least + 3.0


def test_a_rank_that_works_is_left_alone(tmp_path: Path, works: subprocess.Popen[bytes]) -> None:
    watched = Watched(tmp_path, works, alone=True)
    watched.mark(Section.MODEL)
    vigil, end = Vigil(tmp_path, patience_seconds=1.0, alone=True), time.monotonic() + 4.0
    while time.monotonic() < end:
        assert not vigil.look({0: watched.process})
        time.sleep(0.1)


def test_one_that_took_long_before_may_take_ten_times_as_long(tmp_path: Path, sleeps: subprocess.Popen[bytes]) -> None:
    watched = Watched(tmp_path, sleeps, alone=True)
    watched.mark(Section.INPUT)
    assert watched.until_told(most=8.0) is None
    watched.mark(Section.MODEL)
    assert watched.until_told(most=2.0) is None
    watched.mark(Section.INPUT)
    assert watched.until_told(most=60.0) is None
    watched.mark(Section.MODEL)
    found = watched.until_told(most=100.0)
    assert found is not None
    assert found <= 20.0


def test_marks_are_signs_of_life_and_those_of_another_process_are_none(
    tmp_path: Path, sleeps: subprocess.Popen[bytes]
) -> None:
    watched = Watched(tmp_path, sleeps, alone=True)
    for _ in range(20):
        watched.mark(Section.EVALUATE)
        assert watched.until_told(most=5.0) is None
    path = path_of(tmp_path, 0)
    path.write_text(path.read_text().replace(str(watched.process.pid), "1"))
    assert watched.until_told(most=100.0) is None


def test_while_nobody_looks_nobody_stands_still(tmp_path: Path, sleeps: subprocess.Popen[bytes]) -> None:
    """A launcher that was suspended with its workers finds old marks when it goes on."""
    watched = Watched(tmp_path, sleeps, alone=True)
    watched.mark(Section.INPUT)
    assert watched.until_told(most=3600.0, each=1200.0) is None


def test_a_rank_that_a_collective_holds_waits_for_others(
    tmp_path: Path, sleeps: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, sleeps, alone=False)
    monkeypatch.setattr("os.getpid", lambda: watched.process.pid)
    log = CollectiveLog(tmp_path, rank=0)
    slot = log.enter(log.know(Group(name="all", ranks=(0, 1))), "all_reduce", 8)
    watched.mark(Section.MODEL)
    assert watched.until_told(most=100.0) is None
    log.leave(slot, inside_seconds=0.5)
    assert watched.until_told(most=30.0) is not None
