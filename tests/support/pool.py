"""A pool of worker processes that stay up between tests, in process groups of any size on gloo.

    pool.run(function, design, ranks=4) -> [function(design) of rank 0, ... of rank 3]

`function` is importable (module level) and runs on every rank with the default process group made. A rank that
raises, dies or outlives the time fails the call with its own traceback, and the next call has fresh workers.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0
# As many as the largest plan of a test needs.
MOST_WORKERS = 8
# What every worker has from its start, read once: whatever their functions import.
PRELOADED = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "tests.parallel.parity_cases"]


class WorkerError(AssertionError):
    """What a worker raised, with its rank and traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Team:
    """Workers 0 ... size - 1, which meet in `store` and are of no other size.

    torch keeps layouts by mesh shape, with names of groups that a second group of another size would reuse.
    """

    store: str
    workers: list[tuple[Any, Connection]]

    def end(self) -> None:
        """Every worker has ended."""
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()


class Pool:
    """Teams of workers, each started at the first call of its size; the last used stay, MOST_WORKERS in all."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._teams: dict[int, _Team] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-pool-"))
        self._formed = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int, timeout: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """The results of `function(*arguments)` on ranks 0 ... ranks - 1, in order."""
        team = self._teams.pop(ranks, None) or self._form(ranks)
        self._teams[ranks] = team
        try:
            for rank, (_, pipe) in enumerate(team.workers):
                pipe.send((function, arguments, rank, ranks, team.store))
            return _collect(team, timeout)
        except BaseException:  # whatever it was, they are in the middle of something
            self._teams.pop(ranks).end()
            raise

    def close(self) -> None:
        """Every worker has ended."""
        while self._teams:
            self._teams.popitem()[1].end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _form(self, ranks: int) -> _Team:
        """A new team, in place of those that were not used for longest."""
        while self._teams and sum(self._teams) + ranks > MOST_WORKERS:
            self._teams.pop(next(iter(self._teams))).end()
        self._folder.mkdir(exist_ok=True)
        self._formed += 1
        return _Team(store=str(self._folder / f"group-{self._formed}"), workers=[self._start() for _ in range(ranks)])

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _collect(team: _Team, timeout: float) -> list[Any]:
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(team.workers)}
    results: list[Any] = [None] * len(team.workers)
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerError(f"ranks {sorted(waiting.values())} had not answered after {timeout:.0f} s")
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]  # wait() returns what it was given
            failure, results[rank] = _receive(pipe)
            if failure:
                raise WorkerError(f"rank {rank} of {len(team.workers)}:\n{failure}")
    return results


def _receive(pipe: Any) -> tuple[str, Any]:
    try:
        failure, result = pipe.recv()
    except (EOFError, ConnectionResetError):
        return "the process ended", None
    return failure, result


def _serve(pipe: Connection) -> None:
    """A worker: form the group that is asked for, run, answer, until the pipe closes."""
    import torch
    import torch.distributed as dist

    from meshwright.parallel.torch_compat import forget_layouts

    torch.set_num_threads(1)
    # What was read stays: the collector need not look at it again and again.
    gc.freeze()
    # Groups of tests that are done stay open with the team.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    formed, before = False, None
    while True:
        try:
            function, arguments, rank, ranks, store = pipe.recv()
        except EOFError:
            return
        try:
            if not formed:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, ranks),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=TIMEOUT_SECONDS),
                )
                formed = True
            if function is not before:
                # What torch keeps of layouts is of meshes of one function.
                forget_layouts()
                before = function
            answer = ("", function(*arguments))
        except BaseException:  # the parent tells it; a worker has no one else to tell
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
