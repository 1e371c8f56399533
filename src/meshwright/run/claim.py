"""Claim: one launch at a time trains what is in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.spec.errors import ConfigError, Problem


@contextmanager
def claimed(run_dir: Path, *, node: int = 0) -> Iterator[None]:
    """While inside, no other launch claims `run_dir` for the same `node`; the system lets go if this process dies.

    Raises ConfigError, which names its process, where another one has it. Where the file system has no locks nothing
    is claimed.
    """
    path = run_dir / f"claim-{node}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+", encoding="utf-8")
    except OSError:
        yield  # what cannot be written here is told when the run is
        return
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_taken(path)) from None
        except OSError:
            yield
            return
        with suppress(OSError):
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}")
            stream.flush()
        yield


def check_free(run_dir: Path) -> None:
    """Raises ConfigError, which names its process, where a launch of node 0 claims `run_dir`."""
    if (run_dir / "claim-0").is_file():
        with claimed(run_dir):
            return


def _taken(path: Path) -> Problem:
    with path.open(encoding="utf-8", errors="replace") as stream:
        who = stream.read(200).strip() or "another process"
    return Problem(
        what="this run goes on already",
        where=str(path.parent),
        why=f"{who} trains it",
        fix="wait until it has ended, or ask it to (Ctrl-C, SIGTERM); --run names another directory",
    )
