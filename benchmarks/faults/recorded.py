"""What a rank of the recording benchmark does: steps of one run that are watched and steps that are not, in turns."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright import cost
from meshwright.spec.plan import Design
from meshwright.train.build import Place, build
from meshwright.train.loop import emit
from meshwright.train.observe.collective_log import CollectiveLog, read_logs
from meshwright.train.observe.listening import listening

WARM = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Processor seconds of blocks of steps, each watched block beside one that is not; collectives a step."""

    watched: tuple[float, ...]
    plain: tuple[float, ...]
    collectives: float


def measure(design: Design, folder: str, blocks: int, steps: int) -> Measured:
    """Of this rank. Blocks change places from pair to pair, so that what drifts is of both."""
    rank, run_dir = dist.get_rank(), Path(folder)
    log = CollectiveLog(run_dir, rank=rank)
    place = Place(
        rank=rank, device=torch.device("cpu"), run_dir=run_dir, cache=run_dir / "cache", screen=sys.stderr, log=log
    )
    run = build(design, place=place, predicted=cost.predict(design), max_steps=None, stop_asked=bool)

    def block(count: int, *, watched: bool) -> float:
        run.log = log if watched else None
        with listening(log) if watched else nullcontext():
            began = time.process_time()
            for _ in range(count):
                emit(run, run.step())
            return time.process_time() - began

    emit(run, run.start())
    block(WARM, watched=True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(blocks):
        for watched in (True, False) if number % 2 else (False, True):
            seconds[watched].append(block(steps, watched=watched))
    entries = read_logs(run_dir)[rank].entries
    last = [entry for entry in entries if entry.step == entries[-1].step - 1]
    run.close()
    return Measured(watched=tuple(seconds[True]), plain=tuple(seconds[False]), collectives=float(len(last)))
