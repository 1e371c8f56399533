"""Lines of the command line in children of a server that has read its rooms: each a process, but for the reading.

finished = run(["plan", "--model", "tiny"], cwd=folder, environment={**os.environ})
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.pool import PRELOADED

# A process has one server, whichever of the two asks for it first.
ROOMS = ["meshwright.api", "meshwright.cli.app", "meshwright.export", "meshwright.report", "meshwright.search"]
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended, and all that it printed; no code where it outlived the time."""

    code: int | None
    printed: str


def run(arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str]) -> Finished:
    """What `meshwright ARGUMENTS` does in that folder and environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *ROOMS])
    with tempfile.NamedTemporaryFile(mode="r") as printed:
        process = context.Process(target=_run, args=(list(arguments), cwd, dict(environment), printed.name))
        process.start()
        process.join(TIMEOUT_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return Finished(code=None, printed=printed.read())
        return Finished(code=process.exitcode, printed=printed.read())


def _run(arguments: list[str], cwd: Path, environment: dict[str, str], printed: str) -> None:
    from meshwright.cli import main

    gc.freeze()
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["meshwright", *arguments]
    sys.exit(main(arguments))
