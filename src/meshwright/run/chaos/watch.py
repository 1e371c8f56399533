"""What a run shows of itself to whoever looks at its directory: where its ranks are, as which processes, its saves."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from meshwright.train.checkpoint.find import PARTIAL, Checkpoint, corrupt, folders, open_checkpoint
from meshwright.train.checkpoint.manifest import COMMITTED
from meshwright.train.observe.whereabouts import Whereabouts, last_seen

_ENDING_SECONDS = 60.0
_POLL_SECONDS = 0.02


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped; one that has ended and that nobody has asked for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Watch:
    """Looks at the run in `run_dir`, of `ranks` ranks on this host. What launches before left behind does not count."""

    def __init__(self, run_dir: Path, *, ranks: int) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._processes: dict[int, psutil.Process] = {}
        self._past: set[int] = set()
        self._began = 0.0

    def begin(self, *, at: float) -> None:
        """A launch begins at `at`, seconds of the system clock."""
        self._past |= set(self._processes)
        self._processes.clear()
        self._began = at

    def seen(self, rank: int) -> Whereabouts | None:
        """Where `rank` of this launch is or was last; None until it has said so."""
        found = last_seen(self._run_dir, rank)
        return found if found is not None and self._is_worker(found.process) else None

    def process(self, rank: int) -> psutil.Process | None:
        """The process of `rank`; None where there is none that lives, or where it has had another rank since."""
        found = self.seen(rank)
        process = self._processes.get(found.process) if found is not None else None
        if found is None or process is None or not is_alive(process):
            return None
        since = (last_seen(self._run_dir, other) for other in range(self._ranks) if other != rank)
        moved = any(mark is not None and mark.process == found.process and mark.at > found.at for mark in since)
        return None if moved else process

    def workers(self) -> list[psutil.Process]:
        """Processes of all ranks that live."""
        return [found for rank in range(self._ranks) if (found := self.process(rank)) is not None]

    def wait_for_the_end(self) -> None:
        """No process of this launch is left: those that do not end by themselves are killed."""
        self.workers()
        if not self._wait(_ENDING_SECONDS):
            for process in self._processes.values():
                with suppress(psutil.Error):
                    process.kill()
            self._wait(_ENDING_SECONDS)

    def _wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while any(map(is_alive, self._processes.values())):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def is_saving(self) -> bool:
        """Whether a checkpoint that this launch began is being written."""
        for folder in folders(self._run_dir / "checkpoints"):
            with suppress(OSError):
                if folder.name.endswith(PARTIAL) and folder.stat().st_mtime >= self._began:
                    return True
        return False

    def whole(self) -> list[Checkpoint]:
        """Checkpoints of which every byte is right, newest first; none are read where fewer than two are committed."""
        committed = [folder for folder in folders(self._run_dir / "checkpoints") if os.path.exists(folder / COMMITTED)]
        if len(committed) < 2:
            return []
        opened = [open_checkpoint(folder) for folder in committed]
        return [found for found in opened if isinstance(found, Checkpoint) and corrupt(found) is None]

    def _is_worker(self, process: int) -> bool:
        """Whether that number is a worker of this launch, and not of one before or some other program."""
        if process in self._processes:
            return True
        if not process or process in self._past:
            return False
        try:
            found = psutil.Process(process)
            if str(self._run_dir) not in found.cmdline():
                return False
        except psutil.Error:
            return False
        self._processes[process] = found
        return True
