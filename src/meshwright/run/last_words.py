"""Last words: where every thread of a worker stood when it was ended, written without its help."""

from __future__ import annotations

import faulthandler
import signal
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from meshwright.train.observe.stacks import path_of


class LastWords:
    """Keeps `RUN/stacks/rank-00000.txt` ready: at SIGTERM, with which launchers end what is left of a run, the stacks
    of all threads are in it, whatever the main thread is held in; what else the signal asks for is done after.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._path = path_of(run_dir, rank)
        self._file: TextIO | None = None
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            faulthandler.register(signal.SIGTERM, file=self._file, all_threads=True, chain=True)

    def of(self, error: BaseException) -> None:
        """The stack at which `error` was raised is written, as faulthandler would have."""
        if self._file is None:
            return
        frames = reversed(traceback.extract_tb(error.__traceback__))
        lines = [f'  File "{each.filename}", line {each.lineno} in {each.name}\n' for each in frames]
        with suppress(OSError):
            self._file.writelines(["Current thread (most recent call first):\n", *lines])
            self._file.flush()

    def unneeded(self) -> None:
        """The run ended well: nothing of it is left."""
        if self._file is None:
            return
        faulthandler.unregister(signal.SIGTERM)
        with suppress(OSError):
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()
