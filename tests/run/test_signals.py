"""A signal that is sent to a process: one that it does not reach is nobody else's."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.run.elastic.board import Board
from meshwright.run.elastic.crew import Crew
from meshwright.run.signals import send


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """One that was given the number of another that has ended."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def is_another(process: psutil.Process, _number: int) -> None:
    """As psutil tells of a number that was given again."""
    raise psutil.NoSuchProcess(process.pid)


def ends(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_a_process_that_was_given_the_number_of_another_is_spared(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = psutil.Process(other.pid)
    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "send_signal", is_another)
        send(seen, signal.SIGKILL)
        crew = Crew(tmp_path, board=Board.host(word="the word", say=str.strip), arguments=())
        assert crew.end_stopped("1.0", pid=other.pid, late=True)
        assert not ends(other)
    send(seen, signal.SIGKILL)
    assert ends(other)
