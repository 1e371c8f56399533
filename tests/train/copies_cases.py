"""What workers do in the tests of copies: train, copy, lose a rank, and go on elsewhere from what is left."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.copies import left_of
from meshwright.parallel import build_optimizer, lay
from meshwright.parallel.mesh import build_mesh_over
from meshwright.parallel.portable import Portable
from meshwright.parallel.relocate import State, move, state_of
from meshwright.spec.plan import Design
from meshwright.train.copies import Copies
from tests.parallel.move_cases import SEED, Runner, local

PROGRESS = {"step": 2}


def recovered(first: Design, second: Design, lost: int, cut_short: bool) -> tuple[list[str], float, int]:
    """`first` trains two steps on all processes, is copied, and trains on; `second` goes on from the copies on all but
    `lost`. Names of tensors that are not what was copied, the loss of its next step, and the step that it stands at.

    With `cut_short` another copy is begun after the step, and never ends.
    """
    everyone = tuple(range(first.plan.world_size))
    others = tuple(rank for rank in everyone if rank != lost)
    run = _runner(first, everyone)
    assert run is not None
    for number in range(2):
        run.step(number)
    copies = Copies(first, rank=dist.get_rank(), group=dist.group.WORLD)
    copies.take(state_of(first, laid=run.laid, optimizer=run.optimizer).tensors, step=2, progress=PROGRESS)
    whole = _whole(state_of(first, laid=run.laid, optimizer=run.optimizer))
    run.step(2)
    if cut_short:
        _cut_short(copies, state_of(first, laid=run.laid, optimizer=run.optimizer))
    (copy,) = copies.whole
    held = left_of(first, places={rank: rank for rank in others})
    here = dist.get_rank() != lost
    source = State(
        held=held,
        own=Portable(tensors=copy.tensors if here else {}),
        spares=copy.spares if here else {},
    )
    again = _runner(second, others)
    target = state_of(
        second,
        laid=again.laid if again else None,
        optimizer=again.optimizer if again else None,
        processes=others,
    )
    moved = move(source, target, group=dist.group.WORLD, progress=copy.progress if here else None)
    assert moved.progress is not None
    unlike = _unlike(target, whole)
    loss = again.step(2) if again is not None else 0.0
    return unlike, loss, int(moved.progress["step"])


def _cut_short(copies: Copies, state: State) -> None:
    """As when a rank dies while others copy: one tensor is not there to be copied."""
    name = next(reversed(state.tensors))
    tensors = {key: x for key, x in state.tensors.items() if key != name}
    try:
        copies.take(tensors, step=3, progress={"step": 3})
    except KeyError:
        return
    raise AssertionError("a copy of what is not there was made")


def _runner(design: Design, processes: tuple[int, ...]) -> Runner | None:
    mesh = build_mesh_over(design.plan, device_type="cpu", processes=processes, kv_heads=design.model.kv_heads)
    if mesh is None:
        return None
    laid = lay(design, mesh, device="cpu", seed=SEED)
    return Runner(laid=laid, optimizer=build_optimizer(laid, design.job.optimizer))


def _whole(state: State) -> dict[str, Tensor]:
    told: list[Mapping[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, {name: local(x).clone() for name, x in state.tensors.items()})
    found = {}
    for name, held in state.held.items():
        found[name] = torch.zeros(held.shape, dtype=getattr(torch, held.dtype))
        for process, box in held.parts.items():
            found[name][tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))] = told[process][name]
    return found


def _unlike(state: State, whole: Mapping[str, Tensor]) -> list[str]:
    found = []
    for name, held in state.held.items():
        box = held.parts.get(dist.get_rank())
        if box is not None:
            expected = whole[name][tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))]
            found += [] if torch.equal(local(state.tensors[name]), expected) else [name]
    return found
