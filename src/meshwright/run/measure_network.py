"""Collectives among local workers by size and group, and how fast workers compute together. Runs in children."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import psutil

from meshwright.run.allocator import keep_freed_memory
from meshwright.run.measure_layers import layered_pass
from meshwright.spec.cluster import Collective, Precision

MESSAGE_BYTES = (4, 4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
PEER_TIMEOUT = timedelta(seconds=120)
_TURNS, _TURN_SECONDS = 3, 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Seconds of one collective among `ranks` workers; `num_bytes` is the whole tensor (see CollectiveFit)."""

    operation: Collective
    ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimes:
    """All that the workers measured. `together[n - 1]` is the speed of n of them at once relative to one alone."""

    backend: str
    collectives: tuple[CollectiveTime, ...]
    together: tuple[tuple[int, float], ...]
    resident_bytes: int


def measure_network(*, rank: int, world: int, store: str, groups: Sequence[int], seconds: float) -> NetworkTimes:
    """What worker `rank` of `world` finds; rank 0's figures count. `store` is a file that all of them share."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    if cuda:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    keep_freed_memory()
    resident = psutil.Process().memory_info().rss
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=PEER_TIMEOUT)
    try:
        times = tuple(
            time_
            for size in groups
            for time_ in _group_times(dist, size=size, rank=rank, share=seconds / len(groups), cuda=cuda)
        )
        together = () if cuda else _together(dist, sizes=(1, *groups), rank=rank)
    finally:
        dist.destroy_process_group()
    alone = together[0][1] if together else 1.0
    relative = tuple((size, speed / alone) for size, speed in together)
    return NetworkTimes(backend=backend, collectives=times, together=relative, resident_bytes=resident)


def _group_times(dist: Any, *, size: int, rank: int, share: float, cuda: bool) -> list[CollectiveTime]:
    """Every collective at every size among the first `size` workers; the others wait."""
    group = dist.new_group(list(range(size)))
    found: list[CollectiveTime] = []
    if rank < size:
        each = share / len(MESSAGE_BYTES) / len(Collective)
        for num_bytes in MESSAGE_BYTES:
            for operation in Collective:
                call = _call(dist, operation, num_bytes=num_bytes, size=size, rank=rank, group=group, cuda=cuda)
                seconds = _collective_seconds(dist, call, group=group, rank=rank, seconds=each, cuda=cuda)
                if operation is Collective.SEND:
                    seconds /= 2
                found.append(CollectiveTime(operation=operation, ranks=size, num_bytes=num_bytes, seconds=seconds))
    dist.barrier()
    return found


def _call(
    dist: Any, operation: Collective, *, num_bytes: int, size: int, rank: int, group: Any, cuda: bool
) -> Callable[[], object]:
    """One run of the collective; a send goes there and back between the first two workers of the group.

    What is passed on is sent and received as rings of context ranks do (parallel.travel).
    """
    import torch

    count = max(size, num_bytes // 4 // size * size)
    device = f"cuda:{rank}" if cuda else "cpu"
    whole, part = torch.ones(count, device=device), torch.ones(count // size, device=device)
    other = torch.empty(count, device=device)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        elif rank == 1:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    def to_the_next() -> None:
        operations = [
            dist.P2POp(dist.irecv, other, group=group, group_peer=(rank - 1) % size),
            dist.P2POp(dist.isend, whole, group=group, group_peer=(rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    # torch 2.13 renamed both and warns of the old names, which 2.11 alone has.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
        Collective.ALL_GATHER: lambda: gather(other, part, group=group),
        Collective.REDUCE_SCATTER: lambda: scatter(part, whole, group=group),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole, group=group),
        Collective.SEND: there_and_back,
        Collective.PASS: to_the_next,
    }
    return calls[operation]


def _collective_seconds(
    dist: Any, call: Callable[[], object], *, group: Any, rank: int, seconds: float, cuda: bool
) -> float:
    """Mean seconds of a call in the two fastest of five runs of calls back to back, as a step makes them."""
    import torch

    def run(count: int) -> float:
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(count):
            call()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    run(1)
    trial = torch.tensor([run(2)], device=f"cuda:{rank}" if cuda else "cpu")
    dist.broadcast(trial, 0, group=group)
    batches = 5
    count = max(1, min(50, int(seconds / batches / max(float(trial), 1e-6))))
    found = sorted(run(count) for _ in range(batches))
    return sum(found[:2]) / 2


def _together(dist: Any, *, sizes: Sequence[int], rank: int) -> tuple[tuple[int, float], ...]:
    """Passes of layers a second that the first n workers finish when they all compute at once, the others idle.

    Sizes take turns, as the machine may change its pace; the median of each counts.
    """
    import torch

    both_ways = layered_pass(Precision.BF16, batch=2)
    both_ways()
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for _, size in product(range(_TURNS), sizes):
        dist.barrier()
        done, start = 0, time.perf_counter()
        if rank < size:
            while time.perf_counter() < start + _TURN_SECONDS:
                both_ways()
                done += 1
        speed = torch.tensor([done / max(time.perf_counter() - start, 1e-9) if done else 0.0])
        dist.all_reduce(speed)
        found[size].append(float(speed))
    return tuple((size, statistics.median(speeds)) for size, speeds in found.items())
