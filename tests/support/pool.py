"""A pool of worker processes that stays up between tests and forms process groups of any size on gloo.

    pool.run(function, design, ranks=4) -> [function(design) of rank 0, ... of rank 3]

`function` is importable (module level) and runs on every rank with the default process group made. A rank that
raises, dies or outlives the time fails the call with its own traceback, and the next call has fresh workers.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0
MOST_WORKERS = 16  # that stay up, of all sizes of groups together
PRELOADED = ["tests.support.preloaded"]


class WorkerError(AssertionError):
    """What a worker raised, with its rank and traceback."""


class Pool:
    """A crew of workers for every size of group, started at the first call that needs it.

    A crew is of one size for life: torch keeps layouts by mesh shape, with names of groups that a second group of
    another size would reuse. Beyond `MOST_WORKERS` those end that were idle longest.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._crews: dict[int, list[tuple[Any, Connection]]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-pool-"))
        self._groups: dict[int, str] = {}
        self._formed = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int, timeout: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """The results of `function(*arguments)` on ranks 0 ... ranks - 1, in order."""
        crew = self._crews[ranks] = self._crews.pop(ranks, None) or self._start(ranks)
        for rank, (_, pipe) in enumerate(crew):
            pipe.send((function, arguments, rank, ranks, self._groups[ranks]))
        return self._collect(crew, timeout)

    def close(self) -> None:
        """Every worker has ended."""
        for ranks in list(self._crews):
            self._end(ranks)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, ranks: int) -> None:
        for process, pipe in self._crews.pop(ranks):
            pipe.close()
            process.kill()
            process.join()

    def _start(self, ranks: int) -> list[tuple[Any, Connection]]:
        while self._crews and ranks + sum(self._crews) > MOST_WORKERS:
            self._end(next(iter(self._crews)))
        self._folder.mkdir(exist_ok=True)
        self._formed += 1
        self._groups[ranks] = str(self._folder / f"group-{self._formed}")
        return [self._worker() for _ in range(ranks)]

    def _worker(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, crew: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(crew)}
        results: list[Any] = [None] * len(crew)
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                self._end(len(crew))
                raise WorkerError(f"ranks {late} had not answered after {timeout:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]  # wait() returns what it was given
                failure, results[rank] = _receive(pipe)
                if failure:
                    self._end(len(crew))
                    raise WorkerError(f"rank {rank} of {len(crew)}:\n{failure}")
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

    torch.set_num_threads(1)
    current = ""
    while True:
        try:
            function, arguments, rank, ranks, store = pipe.recv()
        except EOFError:
            return
        try:
            if store != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, ranks),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=TIMEOUT_SECONDS),
                )
                current = store
            answer = ("", function(*arguments))
        except BaseException:  # the parent tells it; a worker has no one else to tell
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
