"""What workers do in the tests of moves in memory: lay two designs on some of them, move, compare, go on."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.parallel import Laid, Mesh, build_optimizer, lay, portable
from meshwright.parallel.mesh import build_mesh_over
from meshwright.parallel.packed import Packing, empty
from meshwright.parallel.relocate import State, described, move_through, state_of
from meshwright.parallel.relocate import move as move_over
from meshwright.spec.optimizer import Adafactor, Moments, Optimizer, OptimizerSpec
from meshwright.spec.plan import BlockGroup, Design, Offload
from tests.parallel.move_cases import SEED, Runner, local
from tests.parallel.offload_cases import copying
from tests.support.designs import Layout, plan

Processes = tuple[int, ...]
PROGRESS = {"step": 2, "consumed": 16, "seed": 7}
STAGING = 20_000  # bytes: tensors of tests are cut, and rounds are many


def disagreements(design: Design) -> list[str]:
    """Where the description of a design's state differs from what this rank's tensors are: names, parts and types.

    By its own optimizer, and by one that keeps means by row and by column.
    """
    mesh = _mesh(design, tuple(range(design.plan.world_size)))
    assert mesh is not None
    laid = lay(design, mesh, device="cpu", seed=SEED)
    specs = (design.job.optimizer, Adafactor())
    return [words for spec in specs for words in _disagreements(laid, spec)]


def _disagreements(laid: Laid, spec: Optimizer) -> list[str]:
    design = replace(laid.design, job=replace(laid.design.job, optimizer=spec))
    group = dist.group.WORLD if design.plan.world_size > 1 else None
    state = state_of(design, laid=laid, optimizer=build_optimizer(laid, spec))
    told = described(state.tensors, group=group).held
    found = [f"{name} is on one side alone" for name in told.keys() ^ state.held.keys()]
    for name in told.keys() & state.held.keys():
        ours, theirs = state.held[name], told[name]
        if name.endswith(".step"):  # beside an empty part it is there and of no use
            filled = told[name.replace("optimizer.", "model.").removesuffix(".step")].parts
            parts = {
                process: box for process, box in theirs.parts.items() if process in ours.parts or process in filled
            }
            theirs = replace(theirs, parts=parts)
        if (ours.shape, ours.dtype, dict(ours.parts)) != (theirs.shape, theirs.dtype, dict(theirs.parts)):
            found.append(f"{name} is {theirs}, not {ours}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one process saw of a move: `unlike` names tensors that are not the source's to the bit, or, of moments in a
    byte, not what its own blocks make of the source's numbers, of which `rounded` changed; losses of two steps after
    it, here and on one device; bytes sent and received, the least of all, and what it learnt of progress."""

    unlike: list[str]
    rounded: int
    losses: list[float]
    alone: list[float]
    sent: int
    received: int
    least: int
    progress: dict[str, int] | None


def moved(first: Design, second: Design, ours: Processes, theirs: Processes, folder: str | None) -> Seen:
    """`first` trains two steps on the processes `ours` and goes on as `second` on `theirs`; through `folder` if any."""
    with ExitStack() as stack:
        if any(group.offload is not Offload.NONE for design in (first, second) for group in _groups(design)):
            copying(stack)
        here, there = _runner(first, ours, seed=SEED), _runner(second, theirs, seed=SEED + 1)
        for number in range(2 if here else 0):
            here.step(number)
        source, target = _state(first, here, ours), _state(second, there, theirs)
        zeros = {name: torch.zeros(held.shape, dtype=getattr(torch, held.dtype)) for name, held in target.held.items()}
        whole, progress = {**zeros, **_whole(source)}, PROGRESS if here else None
        sent = received = least = 0
        if folder is None:
            found = move_over(source, target, group=_group(), progress=progress, staging_bytes=STAGING)
            sent, received, least = found.counted.sent_bytes, found.counted.received_bytes, found.least_bytes
            progress = dict(found.progress or {})
        else:
            progress = dict(move_through(Path(folder), source, target, group=_group(), progress=progress) or {})
        unlike, rounded = _unlike(_state(second, there, theirs), whole, form=_form(second))
        losses = [there.step(number) for number in (2, 3)] if there else []
        alone = _alone(second, whole) if _rank() == 0 else []
    return Seen(
        unlike=unlike,
        rounded=rounded,
        losses=losses,
        alone=alone,
        sent=sent,
        received=received,
        least=least,
        progress=progress,
    )


def factors() -> tuple[bool, int, int, int]:
    """Whether the two factors of a low-rank matrix, told by those who have them, are the same in another layout; bytes
    sent and received, and the least of all.

    Rows over the first two processes, then the rank over all four.
    """
    few, all_of_them = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2, 3])
    whole = {"left": torch.arange(96.0).view(12, 8), "right": torch.arange(80.0).view(8, 10)}
    here = {}
    if _rank() < 2:
        here = {name: distribute_tensor(x, few, [Shard(0)], src_data_rank=None) for name, x in whole.items()}
    dims = {"left": 1, "right": 0}
    there = {
        name: distribute_tensor(torch.zeros_like(x), all_of_them, [Shard(dims[name])]) for name, x in whole.items()
    }
    source, target = (described(side, group=_group()) for side in (here, there))
    found = move_over(source, target, group=_group())
    same = all(torch.equal(x.full_tensor(), whole[name]) for name, x in there.items())
    return same, found.counted.sent_bytes, found.counted.received_bytes, found.least_bytes


def _groups(design: Design) -> list[BlockGroup]:
    return [group for stage in design.plan.stages for group in stage.groups]


def left_over(first: Design, second: Design) -> tuple[bool, float]:
    """After a move between plans that had both stepped: whether what rounding left is the source's, and the most."""
    everyone = tuple(range(first.plan.world_size))
    here, there = _runner(first, everyone, seed=SEED), _runner(second, everyone, seed=SEED + 1)
    assert here is not None
    assert there is not None
    here.step(0)
    there.step(1)
    source, target = _state(first, here, everyone), _state(second, there, everyone)
    assert all(x.abs().max() > 0 for side in (source, target) for x in side.own.residuals.values())
    move_over(source, target, group=_group())
    ours, theirs = source.own.residuals.values(), target.own.residuals.values()
    alike = len(ours) == len(theirs) and all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    return alike, max(float(x.abs().max()) for x in theirs)


_MESHES: dict[object, Mesh | None] = {}


def _mesh(design: Design, processes: Processes) -> Mesh | None:
    """Each is made once in a worker. Collective, but for one process alone."""
    plan, heads = design.plan, design.model.kv_heads
    key = plan.axes, plan.exchange.inner, plan.experts, plan.tensor_grid, plan.extents, heads, processes
    if key not in _MESHES:
        _MESHES[key] = build_mesh_over(plan, device_type="cpu", processes=processes, kv_heads=heads)
    return _MESHES[key]


def _runner(design: Design, processes: Processes, *, seed: int) -> Runner | None:
    mesh = _mesh(design, processes)
    if mesh is None:
        return None
    laid = lay(design, mesh, device="cpu", seed=seed)
    return Runner(laid=laid, optimizer=build_optimizer(laid, design.job.optimizer))


def _state(design: Design, run: Runner | None, processes: Processes) -> State:
    if run is None:
        return state_of(design, laid=None, processes=processes)
    return state_of(design, laid=run.laid, optimizer=run.optimizer, processes=processes)


def _whole(state: State) -> dict[str, Tensor]:
    """Every tensor of a state whole, from what all processes have of it. Collective."""
    mine = {name: local(x).clone() for name, x in state.tensors.items()}
    told = [mine]
    if _group() is not None:
        told = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, mine)
    found = {}
    for name, held in state.held.items():
        dtype = getattr(torch, held.dtype)
        found[name] = torch.zeros(held.shape, dtype=dtype)
        for process, box in held.parts.items():
            slices = tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))
            found[name][slices] = told[process][name]
    return found


def _unlike(state: State, whole: dict[str, Tensor], *, form: Moments) -> tuple[list[str], int]:
    found, rounded = [], 0
    for name, held in state.held.items():
        box = held.parts.get(_rank())
        if box is not None:
            slices = tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))
            expected = _packed(name, whole[name][slices], form)
            rounded += int((expected != whole[name][slices]).sum())
            if not torch.equal(local(state.tensors[name]), expected):
                found.append(name)
    copies = state.own.copies
    found += [f"copy of {name}" for name, x in copies if not torch.equal(local(x), local(state.tensors[name]))]
    return found, rounded


def _form(design: Design) -> Moments:
    spec = design.job.optimizer
    return spec.state if isinstance(spec, OptimizerSpec) else Moments.FP32


def _packed(name: str, x: Tensor, form: Moments) -> Tensor:
    """What moments in one byte stand for once x, a part of one, is in the blocks of that part."""
    if not form.in_blocks or not name.endswith((".exp_avg", ".exp_avg_sq")):
        return x
    packing = Packing(form, signed=name.endswith(".exp_avg"), device=x.device)
    into = empty(x.numel(), form=form, device=x.device, wide=x.dtype)
    packing.pack(x.reshape(-1), into)
    return packing.unpack(into, x.dtype).view(x.shape)


def _alone(design: Design, whole: dict[str, Tensor]) -> list[float]:
    """Losses of the steps that one device would take from `whole`."""
    single = plan(design.model, Layout(batch=design.plan.batch))
    single = replace(single, sequence_length=design.plan.sequence_length)
    groups = tuple(
        replace(single.first_group, start=group.start, stop=group.stop, training=group.training)
        for group in design.plan.groups
    )
    single = replace(design, plan=replace(single, stages=(replace(single.stages[0], groups=groups),)))
    run = _runner(single, (_rank(),), seed=SEED)
    assert run is not None
    portable.load_state_dict(run.laid, run.optimizer, whole)
    return [run.step(number) for number in (2, 3)]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
