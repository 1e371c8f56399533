"""Starts processes that form one gloo group and run one function each; a test reads what rank 0 returns."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returned on every rank, in rank order; raises the first failure's own traceback."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [
            context.Process(target=_work, args=(rank, world_size, store, queue, function, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        results: dict[int, Any] = {}
        try:
            for _ in workers:
                rank, failure, result = queue.get(timeout=120)
                if failure is not None:
                    raise AssertionError(f"rank {rank} failed:\n{failure}")
                results[rank] = result
        finally:
            for worker in workers:
                worker.join(timeout=5 if len(results) == world_size else 0.1)
                if worker.is_alive():
                    worker.terminate()
    return [results[rank] for rank in range(world_size)]


def _work(
    rank: int, world_size: int, store: str, queue: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(*arguments)
        dist.barrier()
        queue.put((rank, None, result))
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
        raise
