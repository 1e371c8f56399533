"""What the processes of `benchmarks/faults/checkpoint.py` do: the disk's own bytes and a checkpoint's, in turns."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tests.parallel.move_cases import Runner, runner

from meshwright.parallel.clip import local_part
from meshwright.spec.plan import Design
from meshwright.train.checkpoint import Store

AT_ONCE = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of every round, between two moments at which all ranks were there, the bytes of a checkpoint, and the
    processor seconds that a save and a load took of this rank. A save stops training for `stall`; in every other round
    for `prepared_stall`, where the memory of its copy was got before."""

    bytes: int
    disk_write: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    prepared_stall: list[float] = field(default_factory=list)
    disk_read: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    save_processor: list[float] = field(default_factory=list)
    load_processor: list[float] = field(default_factory=list)


def measure(design: Design, folder: str, rounds: int) -> Times:
    """Each round writes a file of this rank's share, saves, reads that file and loads the checkpoint."""
    run, place = runner(design), Path(folder)
    run.step(0)
    size = sum(local_part(x).nbytes for x in run.state().tensors.values())
    kept = torch.tensor(size)
    dist.all_reduce(kept)
    data = np.random.default_rng(dist.get_rank()).integers(0, 255, size, dtype=np.uint8)
    took, file = Times(bytes=int(kept)), place / f"plain-{dist.get_rank()}"
    for number in range(rounds):
        took.disk_write.append(_taken(lambda: _write(file, data)))
        _save(run, design, place / str(number), took, prepared=number % 2 == 1)
        before = _emptied(run)
        _forget(file)
        took.disk_read.append(_taken(lambda: _read(file)))
        _forget(file)  # what one has read does not leave the other without free memory
        _load(run, design, place / str(number), took, before)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place / str(number))
        file.unlink()
    return took


def _save(run: Runner, design: Design, place: Path, took: Times, *, prepared: bool) -> None:
    """Training goes on when `save` returns, and what is then written is durable when `wait` does."""
    store = Store(place, design=design)
    if prepared:
        store.prepare(run.state())
        for thread in threading.enumerate():
            if thread.name == "staging":
                thread.join()
    dist.barrier()
    began = time.perf_counter()
    store.save(run.state(), step=1, progress={})
    (took.prepared_stall if prepared else took.stall).append(time.perf_counter() - began)
    busy = time.process_time()
    took.save.append(_taken(store.wait))
    took.save_processor.append(time.process_time() - busy)
    store.close()


def _emptied(run: Runner) -> dict[str, torch.Tensor]:
    """What the state was before every element of it is zero."""
    before = {name: local_part(x).clone() for name, x in run.state().tensors.items()}
    with torch.no_grad():
        for x in run.state().tensors.values():
            local_part(x).zero_()
    return before


def _load(run: Runner, design: Design, place: Path, took: Times, before: dict[str, torch.Tensor]) -> None:
    """What is in the memory of the operating system of it is forgotten before; every bit is as `before` after."""
    for path in place.rglob("*"):
        if path.is_file():
            _forget(path)
    store = Store(place, design=design)
    began, busy = _together(), time.process_time()
    found = store.newest(lambda found: store.load(found, run.state()))
    took.load.append(_together() - began)
    took.load_processor.append(time.process_time() - busy)
    assert all(torch.equal(local_part(x), before[name]) for name, x in run.state().tensors.items())
    assert found is not None, "it was saved a moment ago"
    store.close()


def _write(path: Path, data: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), AT_ONCE):
            file.write(data[start : start + AT_ONCE])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    into = bytearray(AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass


def _forget(path: Path) -> None:
    """The operating system keeps none of it in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _taken(work: Callable[[], None]) -> float:
    began = _together()
    work()
    return _together() - began


def _together() -> float:
    dist.barrier()
    return time.perf_counter()
