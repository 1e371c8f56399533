"""One launch of a run as a process of its own: what it said, and how it ended, as whoever started it sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from meshwright.spec.chaos import LaunchEnd
from meshwright.spec.errors import ExitCode
from meshwright.train.observe.timekeeper import steady_clock

_ENDING_SECONDS = 30.0


def log_of(logs: Path, number: int) -> Path:
    """Where what launch `number` says is kept."""
    return logs / f"launch-{number:03d}.log"


def next_number(logs: Path) -> int:
    """After all launches whose logs are there."""
    told = (log.stem.removeprefix("launch-") for log in logs.glob("launch-*.log"))
    return 1 + max((int(number) for number in told if number.isdecimal()), default=0)


class Launch:
    """A process that trains, with its output in `log`; used with `with`, after which it has ended."""

    def __init__(self, command: Sequence[str], *, number: int, log: Path) -> None:
        self.number, self._log = number, log
        self._clock, self.began = steady_clock(), time.time()
        self._errors: list[str] = []
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.process = psutil.Process(self._process.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_ENDING_SECONDS)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> LaunchEnd:
        """How it ended, which it has."""
        code, seconds = self._process.wait(), self._clock() - self.began
        # Workers that outlive it hold the pipe.
        self._reader.join(1.0)
        return LaunchEnd(number=self.number, seconds=seconds, exit_code=code, words=self._words(code))

    def _words(self, code: int) -> str:
        if self._errors:
            return "; ".join(self._errors)
        if code == ExitCode.SAVED:
            return "it was asked to stop, and saved"
        if code < 0:
            return f"it was killed (signal {-code})"
        return "" if code == ExitCode.OK else f"exit code {code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if line.startswith("error: "):
                    self._errors.append(line.removeprefix("error: ").strip())
