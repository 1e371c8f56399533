"""Learners of which one is lost and comes back: what workers do. They are the processes of one group all the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch
import torch.distributed as dist

from meshwright.cost.copies import left_of
from meshwright.cost.learner_holdings import Origins
from meshwright.parallel import relocate
from meshwright.parallel.mesh import build_mesh_over
from meshwright.parallel.outer import Learners, remembered
from meshwright.parallel.portable import Portable
from meshwright.parallel.relocate import State
from meshwright.spec.plan import Design, Plan
from meshwright.train.copies import Copies, Copy
from tests.parallel.outer_cases import Absence, Worker

_KNOWN: dict[object, Learners | None] = {}


def learners_over(plan: Plan, processes: Sequence[int]) -> Learners | None:
    """As `build_learners`, where rank r is process `processes[r]`; None where this is none of them."""
    key = plan.axes, tuple(processes)
    if key not in _KNOWN:
        _KNOWN[key] = _learners_over(plan, processes)
    return _KNOWN[key]


def _learners_over(plan: Plan, processes: Sequence[int]) -> Learners | None:
    members = [[processes[rank] for rank in plan.ranks_of_learner(learner)] for learner in range(plan.learners)]
    own = plan.of_learner()
    meshes = [build_mesh_over(own, device_type="cpu", processes=ranks) for ranks in members]
    everyone = dist.new_group(list(processes))
    across, meeting = ([dist.new_group(list(ranks)) for ranks in zip(*members, strict=True)] for _ in range(2))
    found = next(((index, mesh) for index, mesh in enumerate(meshes) if mesh is not None), None)
    if found is None:
        return None
    index, mesh = found
    return Learners(
        index=index,
        count=plan.learners,
        mesh=mesh,
        across=across[mesh.rank],
        meeting=meeting[mesh.rank],
        everyone=everyone,
    )


def copied(worker: Worker, *, step: int) -> Copy:
    """What this rank copies after `step`, while what is on its way stays there."""
    copies = Copies(worker.design, rank=worker.learners.rank, group=None)
    kept = remembered(worker.design, worker.state(), worker.outer)
    copies.take(kept.tensors, step=step, progress=worker.outer.told())
    return copies.whole[0]


def taken_over(
    design: Design, learners: Learners, *, before: Design, copy: Copy | None, places: dict[int, int], origins: Origins
) -> tuple[Worker, int]:
    """A worker of `design` that goes on from the copies of `before`, whose rank r is now rank `places[r]`; sequences of
    lost learners that count for nothing."""
    worker = Worker(design, learners)
    for p in worker.laid.parts:
        for x in p.parameters():
            torch.nn.init.constant_(x, 7.0)  # whatever is not moved shows
    held = left_of(before, places=places)
    source = State(held=held, own=Portable(tensors={} if copy is None else copy.tensors))
    target = remembered(design, worker.state(), worker.outer, origins=origins)
    progress = None if copy is None else copy.progress
    moved = relocate.move(source, target, group=learners.everyone, progress=progress)
    assert moved.progress is not None
    step = moved.progress["step"]
    return worker, worker.outer.take_over(moved.progress, origins=origins, step=step)


def absent(
    design: Design, fewer: Design, absence: Absence, steps: int
) -> tuple[int, dict[str, numpy.ndarray], tuple[int, int]]:
    """After `steps` steps in which `absence` was: the learner of this rank, its parameters, and what was dropped."""
    ranks = dist.get_world_size()
    gone = () if absence.learner is None else design.plan.ranks_of_learner(absence.learner)
    survivors = [rank for rank in range(ranks) if rank not in gone]
    whole, rest = learners_over(design.plan, range(ranks)), learners_over(fewer.plan, survivors)
    assert whole is not None
    worker = Worker(design, whole)
    copy: Copy | None = None
    for number in range(1, absence.left + 3):
        worker.step(number)
        copy = copied(worker, step=number) if number == absence.left else copy
    worker.close()
    assert copy is not None
    copy = replace(copy, progress={**copy.progress, "step": absence.left})
    dropped = 0
    if rest is not None:
        kept = tuple(learner for learner in range(design.plan.learners) if learner != absence.learner)
        places = {rank: place for place, rank in enumerate(survivors)}
        few, dropped = taken_over(fewer, rest, before=design, copy=copy, places=places, origins=kept)
        for number in range(absence.left + 1, absence.back + 1):
            few.step(number)
        copy = copied(few, step=absence.back)
        copy = replace(copy, progress={**copy.progress, "step": absence.back})
        few.outer.drain()
    else:
        copy = None  # what it has is stale
    dist.barrier()
    order = iter(range(fewer.plan.learners))
    back = tuple(None if learner == absence.learner else next(order) for learner in range(design.plan.learners))
    again, none = taken_over(design, whole, before=fewer, copy=copy, places=dict(enumerate(survivors)), origins=back)
    for number in range(absence.back + 1, steps + 1):
        again.step(number)
    own = again.parameters()
    again.close()
    return again.learners.index, own, (dropped, none)
