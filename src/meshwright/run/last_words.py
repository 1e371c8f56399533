"""Last words: where every thread of a worker stood when it was ended, written without its help."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from meshwright.train.observe.stacks import path_of

_READ = 64


class LastWords:
    """Keeps `RUN/stacks/rank-00000.txt` ready: at SIGTERM, with which launchers end what is left of a run, and at
    SIGUSR2, which asks for nothing else, the stacks of all threads are in it, also where the main thread is held in a
    call; what else SIGTERM asks for is done too.

    SIGTERM has to have a handler of Python's, and this to be made in the main thread. A thread of its own writes,
    while no other runs: what faulthandler writes from the signal itself, as others go on, can crash the process.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._path = path_of(run_dir, rank)
        self._file: TextIO | None = None
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            heard, self._signals = os.pipe()
            os.set_blocking(self._signals, False)
            signal.signal(signal.SIGUSR2, _hear)
            signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(heard,), name="last words", daemon=True).start()

    def _listen(self, heard: int) -> None:
        """Until there is nobody to hear any more."""
        while numbers := os.read(heard, _READ):
            if signal.SIGTERM in numbers or signal.SIGUSR2 in numbers:
                self._write(_stacks())
        os.close(heard)

    def _write(self, text: str) -> None:
        assert self._file is not None
        with suppress(OSError, ValueError):
            self._file.write(text)
            self._file.flush()

    def of(self, error: BaseException) -> None:
        """The stack at which `error` was raised is written, as faulthandler would have."""
        if self._file is None:
            return
        frames = reversed(traceback.extract_tb(error.__traceback__))
        calls = (_call(each.filename, each.lineno, each.name) for each in frames)
        self._write("".join(["Current thread (most recent call first):\n", *calls]))

    def unneeded(self) -> None:
        """The run ended well: nothing of it is left."""
        if self._file is None:
            return
        signal.set_wakeup_fd(-1)
        os.close(self._signals)
        with suppress(OSError):
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()


def _hear(_number: int, _frame: FrameType | None) -> None:
    """The thread that listens does what there is to do."""


def _stacks() -> str:
    """Of all threads but this one, the main one last, the newest call of each first: as faulthandler writes them."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    told = []
    for ident in (*others, main):
        if ident in frames:
            told += [f"Thread 0x{ident:016x} (most recent call first):\n", *_calls(frames[ident])]
    return "".join(told)


def _calls(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield _call(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _call(file: str, line: int | None, name: str) -> str:
    return f'  File "{file}", line {line if line is not None else "???"} in {name}\n'
