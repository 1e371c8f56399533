"""Small trials that need torch, run in fresh processes: what torch sees, and one all-reduce."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_NUMBERS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says of itself: its version, the accelerators it sees, and its nccl ("" without)."""

    version: str
    accelerators: tuple[str, ...]
    nccl: str


def torch_facts() -> TorchFacts:
    """What the torch of this process sees."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if seen and dist.is_nccl_available() else ""
    names = tuple(torch.cuda.get_device_name(index) for index in range(seen))
    return TorchFacts(version=str(torch.__version__), accelerators=names, nccl=nccl)


def all_reduce_once(*, rank: int, world: int, store: str) -> tuple[float, float]:
    """(sum, seconds) of 1 MiB of rank + 1 summed over `world` processes by gloo; `store` is a file they share."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    return _timed_sum(rank)


def _timed_sum(rank: int) -> tuple[float, float]:
    try:
        numbers = torch.full((_NUMBERS,), float(rank + 1))
        start = time.perf_counter()
        dist.all_reduce(numbers)
        seconds = time.perf_counter() - start
    finally:
        dist.destroy_process_group()
    return float(numbers[0]), seconds


def main() -> None:
    """Under torchrun: every process prints the sum that it found."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    total, seconds = _timed_sum(rank)
    print(f"rank {rank}: sum {total:g} in {1e3 * seconds:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
