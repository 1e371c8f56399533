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
# What every worker has from its start, read once: whatever their functions import.
PRELOADED = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "tests.parallel.parity_cases"]


class WorkerError(AssertionError):
    """What a worker raised, with its rank and traceback."""


class Pool:
    """Workers 0 ... size - 1, started at the first call that needs them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-pool-"))
        self._group = 0
        self._ranks = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int, timeout: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """The results of `function(*arguments)` on ranks 0 ... ranks - 1, in order."""
        if ranks != self._ranks:
            # torch keeps layouts by mesh shape, with names of groups that a second group of another size would reuse.
            self.close()
            self._group, self._ranks = self._group + 1, ranks
        self._grow(ranks)
        self._folder.mkdir(exist_ok=True)
        store = str(self._folder / f"group-{self._group}")
        for rank, (_, pipe) in enumerate(self._workers[:ranks]):
            pipe.send((function, arguments, rank, ranks, store))
        return self._collect(ranks, timeout)

    def close(self) -> None:
        """Every worker has ended."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers, self._ranks = [], 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, ranks: int) -> None:
        while len(self._workers) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, ranks: int, timeout: float) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:ranks])}
        results: list[Any] = [None] * ranks
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                self.close()
                raise WorkerError(f"ranks {late} had not answered after {timeout:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]  # wait() returns what it was given
                failure, results[rank] = _receive(pipe)
                if failure:
                    self.close()
                    raise WorkerError(f"rank {rank} of {ranks}:\n{failure}")
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
    current, before = "", None
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
            if function is not before:
                # What torch keeps of layouts is of meshes of one function.
                forget_layouts()
                before = function
            answer = ("", function(*arguments))
        except BaseException:  # the parent tells it; a worker has no one else to tell
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
