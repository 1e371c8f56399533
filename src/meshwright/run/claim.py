"""Claim: one launch at a time trains what is in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem

LOOK_SECONDS = 0.5


class Claim:
    """That this process trains what is in the folder of `path`, which is locked. `lost` is how another launch took the
    folder, made again after it was deleted or moved away, before this one could."""

    def __init__(self, path: Path) -> None:
        self.lost: EnvironmentUnfit | None = None
        self._path = path
        self._streams = ExitStack()
        self._held: set[tuple[int, int]] = set()

    def take(self) -> None:
        """It is claimed. Raises ConfigError where another process has it, OSError where it cannot be."""
        stream = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(_taken(self._path)) from None
            raise
        self._keep(stream)

    def take_again(self) -> None:
        """As `take`, where the folder was made again since; what was claimed before stays so."""
        if self._held and self._path.parent.is_dir() and not self._is_held():
            self.take()

    def release(self) -> None:
        self._streams.close()

    def _is_held(self) -> bool:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) in self._held

    def _keep(self, stream: TextIO) -> None:
        self._streams.enter_context(stream)
        found = os.fstat(stream.fileno())
        self._held.add((found.st_dev, found.st_ino))
        with suppress(OSError):
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}")
            stream.flush()


@contextmanager
def claimed(run_dir: Path, *, node: int = 0, end: Callable[[], None] | None = None) -> Iterator[Claim]:
    """While inside, no other launch claims `run_dir` for the same `node`; the system lets go if this process dies.

    Where the folder is deleted or moved away meanwhile and made again, it is claimed again; where another launch was
    there first `end` is called until what is inside has ended, and EnvironmentUnfit is raised then. Raises ConfigError,
    which names its process, where another one has it. Where the file system has no locks nothing is claimed.
    """
    claim = Claim(run_dir / f"claim-{node}")
    with suppress(OSError):  # what cannot be written here is told when the run is
        run_dir.mkdir(parents=True, exist_ok=True)
        claim.take()
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(claim, over, end), name="claim", daemon=True)
    if end is not None:
        watcher.start()
    try:
        yield claim
    finally:
        over.set()
        if end is not None:
            watcher.join()
        claim.release()
        if claim.lost is not None:
            raise claim.lost


def check_free(run_dir: Path) -> None:
    """Raises ConfigError, which names its process, where a launch of node 0 claims `run_dir`."""
    if (run_dir / "claim-0").is_file():
        with claimed(run_dir):
            return


def _watch(claim: Claim, over: threading.Event, end: Callable[[], None]) -> None:
    while not over.wait(LOOK_SECONDS):
        if claim.lost is None:
            try:
                claim.take_again()
            except ConfigError as error:
                claim.lost = EnvironmentUnfit(_overtaken(error.problems[0]))
            except OSError:
                continue
        if claim.lost is not None:
            end()


def _taken(path: Path) -> Problem:
    with path.open(encoding="utf-8", errors="replace") as stream:
        who = stream.read(200).strip() or "another process"
    return Problem(
        what="this run goes on already",
        where=str(path.parent),
        why=f"{who} trains it",
        fix="wait until it has ended, or ask it to (Ctrl-C, SIGTERM); --run names another directory",
    )


def _overtaken(taken: Problem) -> Problem:
    return Problem(
        what="another launch has this directory now, and this one was stopped",
        where=taken.where,
        why=f"the directory was deleted or moved away and made again, and {taken.why}",
        fix="what this one saved before is where that directory is now; --run names another directory",
    )
