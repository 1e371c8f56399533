"""Move: parameters, buffers, optimizer state and progress of a run from any plan to any other, over one process group
or through files.

Resuming on other machines, growing and shrinking, and giving weights to another role are all this: a source or a
checkpoint of it, a target, and what is held of each. What is sent is the least there is (`cost.moved`), the way it goes
is a function of the two plans (`cost.routes`), and only refusals and progress are asked of the others first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from meshwright.cost.holdings import OPTIMIZER, Box, Contents, Holding, digest, holdings
from meshwright.cost.moved import afresh, unfit
from meshwright.cost.way import Way
from meshwright.parallel import stored
from meshwright.parallel.clip import local_part
from meshwright.parallel.portable import HasParts, Portable, portable
from meshwright.parallel.transfer import Counted, Side, box_of, transfer
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design

T = TypeVar("T")

STAGING_BYTES = 64 * 2**20
MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Of a checkpoint, the `names` under which this process finds its own in place of those of every plan, and more
    `tensors` to be loaded."""

    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One side of a move: what every process of the group holds of it, and what this one has of it, with the `spares`
    that it keeps for processes that are gone."""

    held: Mapping[str, Holding]
    own: Portable
    spares: Mapping[str, Tensor] = field(default_factory=dict)
    beside: Beside = Beside(names={}, tensors={})

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.own.tensors


def state_of(
    design: Design,
    *,
    laid: HasParts | None,
    optimizer: torch.optim.Optimizer | None = None,
    contents: Contents = Contents.TRAINING,
    processes: Sequence[int] | None = None,
) -> State:
    """The state of `design`, whose rank r is process `processes[r]` of the group, and what of it this process has.

    A process that holds no rank of the plan gives None for `laid`. An optimizer that has made no step yet has its
    state afterwards, as it is before the first one. What moments of one byte stand for is copied into the host's
    memory, so that this tells of the state as it is now. Raises ConfigError where the plan has learners, who hold
    unlike parameters: `outer.state_of` tells of them.
    """
    if design.plan.learners > 1:
        fix = "save them in a checkpoint, which any plan goes on from"
        raise ConfigError(Problem(what="learners hold unlike parameters", where="plan.gradients.kind", fix=fix))
    held = holdings(design, contents=contents, processes=processes)
    if laid is None:
        return State(held=held, own=Portable(tensors={}))
    return State(held=held, own=portable(laid, optimizer if contents is Contents.TRAINING else None))


def described(tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None) -> State:
    """As `state_of`, of any tensors by name whatever laid them: each process tells the others what it has. Collective.

    Raises ConfigError where they do not agree on a tensor's shape and type.
    """
    mine = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch."), box_of(x)) for name, x in tensors.items()}
    told = _gathered(mine, group)
    held: dict[str, Holding] = {}
    problems = []
    for process, entries in enumerate(told):
        for name, (shape, dtype, box) in entries.items():
            one = held.setdefault(name, Holding(shape=shape, dtype=dtype, parts={}))
            if (one.shape, one.dtype) != (shape, dtype):
                problems.append(Problem(what=f"{name} is {one.shape} {one.dtype} and {shape} {dtype}", where="state"))
            elif box.elements:
                held[name] = replace(one, parts={**one.parts, process: box})
    if problems:
        raise ConfigError(problems)
    return State(held=held, own=Portable(tensors=dict(tensors)))


def whole_of(laid: HasParts) -> State:
    """Of a model that is all in this process, without an optimizer."""
    return described(portable(laid).tensors, group=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a move did: bytes that this process sent and got, as it gave them to the group, and those it had already.

    `least_bytes` is the least that all processes together can be sent, and as much is sent; `progress` what the
    source's processes told of where the run stands.
    """

    counted: Counted
    least_bytes: int
    rounds: int
    progress: Mapping[str, Any] | None


def move(
    source: State,
    target: State,
    *,
    group: dist.ProcessGroup | None,
    progress: Mapping[str, Any] | None = None,
    nodes: Sequence[int] | None = None,
    staging_bytes: int = STAGING_BYTES,
    way: Way | None = None,
) -> Moved:
    """Every tensor of `target` holds what `source` holds, whatever the two plans, without files.

    Collective over `group`, the processes of both sides; None is one process alone. Every process is sent each byte
    that it needs and does not hold once, and sends none twice; messages of one round are at most `staging_bytes` each
    way. `nodes[p]` is the node of process p, None one for all: no byte enters a node twice, nor one that has it. Where
    the `way` was known before, it is not worked out again.
    Processes of the source tell their `progress` (step, data position, seed), alike; the others learn it. Raises
    ConfigError on every process, before anything is changed, with all that keeps target from being made of source.
    """
    if way is None or not way.joins(source.held, target.held):
        way = Way.between(source.held, target.held, staging_bytes=staging_bytes, nodes=nodes)
    problems = [*way.problems, *_misheld(source, "source", group), *_misheld(target, "target", group)]
    progress = _agreed(problems, way.digests, progress=progress, group=group)
    process = _process(group)
    wanted = {name: holding for name, holding in target.held.items() if name not in way.new}
    counted = transfer(
        Side(held=source.held, tensors=source.tensors, process=process, spares=source.spares),
        Side(held=wanted, tensors=target.tensors, process=process),
        way.hops,
        group=group,
    )
    assert counted.received_bytes == way.least.get(process, 0), (
        "a process is sent what it needs and does not hold, once"
    )
    _finish(target, new=way.new, residuals=source.own.residuals)
    return Moved(counted=counted, least_bytes=sum(way.least.values()), rounds=len(way.hops), progress=progress)


def move_through(
    folder: Path,
    source: State,
    target: State,
    *,
    group: dist.ProcessGroup | None,
    progress: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """As `move`, through files in `folder`, which every process sees; returns the progress that the source told."""
    problems = [
        *unfit(source.held, target.held),
        *_misheld(source, "source", group),
        *_misheld(target, "target", group),
    ]
    digests = digest(source.held), digest(target.held)
    progress = _agreed(problems, digests, progress=progress, group=group)
    stored.write(kept(source, group=group), folder, group=group)
    load(stored.Reader(folder), target, group=group)
    return progress


def kept(source: State, *, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """What this process gives to a checkpoint of `source`, for `stored.write`: what it holds and keeps up to date.

    A rank whose part of a parameter is empty never steps it: its step count stands still and is not the run's.
    """
    process = _process(group)
    mine = {n: x for n, x in source.tensors.items() if isinstance(x, DTensor) or process in source.held[n].parts}
    return {**mine, **source.own.residuals}


def load(source: StorageReader, target: State, *, group: dist.ProcessGroup | None) -> None:
    """Every tensor of `target` holds what the checkpoint `source` holds, whatever plan saved it: a move whose source
    is files. Collective over `group`, the processes of the target.

    An optimizer of which the checkpoint has nothing begins. Raises ConfigError on every process, before anything is
    changed, with all that keeps target from being made of the checkpoint; and as `stored.read`, which leaves target
    half of it.
    """
    held = stored.held_in(source)
    new = afresh(held, target.held)
    if not any(name.startswith(OPTIMIZER) for name in held):
        new = frozenset(name for name in target.held if name.startswith(OPTIMIZER))
    wanted = {name: holding for name, holding in target.held.items() if name not in new}
    where = str(source.folder) if isinstance(source, stored.Reader) else "state"
    fix = "resume from another checkpoint; nothing of this one was loaded"
    problems = [replace(one, where=where, fix=fix) for one in unfit(held, wanted, names=("checkpoint", "run"))]
    own = {name: target.beside.names.get(name, name) for name in target.tensors if name in wanted}
    absent = [name for name in (*own.values(), *target.beside.tensors) if name not in held]
    if absent and not problems:
        problems.append(Problem(what=f"the checkpoint has no {absent[0]}", where=where, fix=fix))
    problems += _misheld(target, "run", group)
    _agreed(problems, (digest(held), digest(target.held)), progress=None, group=group)
    left = {name: x for name, x in target.own.residuals.items() if name in held}
    tensors = {own[name]: target.tensors[name] for name in own}
    stored.read({**tensors, **target.beside.tensors, **left}, source, group=group)
    _finish(target, new=new, residuals=left)


def _agreed(
    problems: Sequence[Problem],
    digests: tuple[str, str],
    *,
    progress: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
) -> Mapping[str, Any] | None:
    """What the source's processes tell of their progress. Raises ConfigError on all where any finds a problem."""
    told = _gathered((digests, list(problems), progress), group)
    every = list(dict.fromkeys(problem for _, found, _ in told for problem in found))
    if len({sides for sides, _, _ in told}) > 1:
        every.append(Problem(what="processes see unlike plans", where="state", fix="give all of them the same two"))
    known = [entry for _, _, entry in told if entry is not None]
    if any(entry != known[0] for entry in known):
        every.append(Problem(what="processes of the source stand at unlike steps", where="state"))
    if every:
        raise ConfigError(every)
    return known[0] if known else None


def _misheld(state: State, side: str, group: dist.ProcessGroup | None) -> list[Problem]:
    """Where the tensors of this process are not what `state` says of it."""
    problems, process, alike = [], _process(group), dict[tuple[object, ...], Box]()
    for name, holding in state.held.items():
        box = holding.parts.get(process)
        if box is None:
            continue
        here = state.tensors.get(name)
        found = None if here is None else _found(here, box, alike=alike)
        kind = "" if here is None else str(here.dtype).removeprefix("torch.")
        if found != box or kind != holding.dtype:
            what = f"{name} of the {side} is {_words(here)} on process {process}, not {box.sizes} {holding.dtype}"
            problems.append(Problem(what=what, where="state", fix="give the model and optimizer of that design"))
    return problems[:MOST_TOLD]


def _found(x: Tensor, box: Box, *, alike: dict[tuple[object, ...], Box]) -> Box:
    """Where `x` lies, asked once of those that lie `alike`; a tensor of one process does not say where, and lies where
    `box` does."""
    if not isinstance(x, DTensor):
        return Box(box.starts, tuple(x.shape))
    key = id(x.device_mesh), x.placements, x.shape, local_part(x).shape
    if key not in alike:
        alike[key] = box_of(x)
    return alike[key]


def _finish(target: State, *, new: frozenset[str], residuals: Mapping[str, Tensor]) -> None:
    """State that is `new` begins, second copies on this process equal the first, moments are packed, and what another
    plan's rounding left is of no use."""
    with torch.no_grad():
        for name in new & target.tensors.keys():
            local_part(target.tensors[name]).zero_()
        for name, left in target.own.residuals.items():
            if name in residuals:
                left.copy_(residuals[name])
            else:
                left.zero_()
    target.own.settle()


def _process(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every process gave, in the group's order. Collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _words(x: Tensor | None) -> str:
    return "missing" if x is None else f"{box_of(x).sizes} {str(x.dtype).removeprefix('torch.')}"
