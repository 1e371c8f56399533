"""Learners that go on under another plan of as many: what workers do."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from meshwright.parallel import relocate, stored
from meshwright.parallel.outer import loaded, remembered, saved
from meshwright.spec.plan import Design
from tests.parallel.outer_cases import Worker


def carried(
    first: Design, second: Design, at: int, steps: int, folder: str | None
) -> tuple[int, dict[str, numpy.ndarray]]:
    """After `steps` steps, of which `first` does `at` and `second` the others: the learner of this rank and its
    parameters. What it goes on from moves in memory, or through `folder`; what travels then is not lost."""
    here, there = Worker(first), Worker(second)
    for number in range(1, at + 1):
        here.step(number)
    there.step(steps + 1)
    there.outer.drain()
    for part in there.laid.parts:
        for x in part.parameters():
            torch.nn.init.constant_(x, 7.0)  # whatever is not moved shows
    if folder is None:
        _in_memory(here, there, at=at)
    else:
        _through_files(here, there, at=at, folder=Path(folder))
    for number in range(at + 1, steps + 1):
        there.step(number)
    found = there.parameters()
    here.close()
    there.close()
    return there.learners.index, found


def _in_memory(here: Worker, there: Worker, *, at: int) -> None:
    source = remembered(here.design, here.state(), here.outer)
    target = remembered(there.design, there.state(), there.outer)
    told = {**here.outer.told(), "step": at}
    here.outer.drain()
    moved = relocate.move(source, target, group=dist.group.WORLD, progress=told)
    assert moved.progress == told
    assert there.outer.take_over(told, origins=range(there.learners.count), step=at) == 0


def _through_files(here: Worker, there: Worker, *, at: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    kept = saved(here.state(), here.outer)
    stored.write(relocate.kept(kept, group=dist.group.WORLD), folder, group=dist.group.WORLD)
    assert there.outer.goes_on_from(here.outer.told())
    target = loaded(there.state(), there.outer, step=at)
    relocate.load(stored.Reader(folder), target, group=dist.group.WORLD)
    there.outer.settle()
