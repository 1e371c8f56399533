"""What the processes of `make bench-move` do: lay two designs, and move the state of one to the other both ways."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.parallel import build_optimizer, lay
from meshwright.parallel.mesh import build_mesh_over
from meshwright.parallel.relocate import State, move, move_through, state_of
from meshwright.spec.plan import Design

Processes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One process's bytes of one move in memory, the least of all, and seconds of each of some, both ways."""

    sent_bytes: int
    received_bytes: int
    least_bytes: int
    rounds: int
    memory_seconds: list[float]
    folder_seconds: list[float]


def moves(first: Design, second: Design, ours: Processes, theirs: Processes, folder: str, times: int) -> Times:
    """`first` on the processes `ours` gives its state to `second` on `theirs`, `times` times each way."""
    source, target = _state(first, ours, seed=1), _state(second, theirs, seed=2)
    memory, files = [], []
    for _ in range(times):
        start = _together()
        moved = move(source, target, group=dist.group.WORLD)
        memory.append(_together() - start)
    for turn in range(times):
        start = _together()
        place = Path(folder) / str(turn)
        move_through(place, source, target, group=dist.group.WORLD)
        files.append(_together() - start)
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return Times(
        sent_bytes=moved.counted.sent_bytes,
        received_bytes=moved.counted.received_bytes,
        least_bytes=moved.least_bytes,
        rounds=moved.rounds,
        memory_seconds=memory,
        folder_seconds=files,
    )


def _state(design: Design, processes: Processes, *, seed: int) -> State:
    mesh = build_mesh_over(design.plan, device_type="cpu", processes=processes, kv_heads=design.model.kv_heads)
    if mesh is None:
        return state_of(design, laid=None, processes=processes)
    laid = lay(design, mesh, device=torch.device("cpu"), seed=seed)
    optimizer = build_optimizer(laid, design.job.optimizer)
    return state_of(design, laid=laid, optimizer=optimizer, processes=processes)


def _together() -> float:
    dist.barrier()
    return time.perf_counter()
