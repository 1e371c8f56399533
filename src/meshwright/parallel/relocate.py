"""Move: parameters, buffers, optimizer state and progress of a run from any plan to any other, over one process group.

Resuming on other machines, growing and shrinking, and giving weights to another role are all this: a source, a target,
and what every process holds of each. What is sent is the least there is (`cost.moved`), the way it goes is a function
of the two plans (`cost.routes`), and only refusals and progress are asked of the others first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.cost.holdings import Contents, Holding, digest, holdings
from meshwright.cost.moved import afresh, least_bytes, unfit
from meshwright.cost.routes import rounds, routes
from meshwright.parallel.clip import local_part
from meshwright.parallel.move import RESIDUAL, HasParts, named_tensors, read, write
from meshwright.parallel.optimizer import LocalOptimizer
from meshwright.parallel.transfer import Counted, Side, box_of, transfer
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design

T = TypeVar("T")

STAGING_BYTES = 64 * 2**20
MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One side of a move: what every process of the group holds of it, and the `tensors` of this one by name.

    `copies` are further tensors of a name that is among them, and `residuals` what rounding left of gradients.
    """

    held: Mapping[str, Holding]
    tensors: Mapping[str, Tensor]
    copies: tuple[tuple[str, Tensor], ...] = ()
    residuals: Mapping[str, Tensor] = field(default_factory=dict)


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
    state afterwards, as it is before the first one.
    """
    held = holdings(design, contents=contents, processes=processes)
    if laid is None:
        return State(held=held, tensors={})
    if contents is Contents.PARAMETERS:
        optimizer = None
    elif isinstance(optimizer, LocalOptimizer):
        optimizer.prepare()
    return _state(held, list(named_tensors(laid, optimizer)))


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
    return State(held=held, tensors=dict(tensors))


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
) -> Moved:
    """Every tensor of `target` holds what `source` holds, whatever the two plans, without files.

    Collective over `group`, the processes of both sides; None is one process alone. Every process is sent each byte
    that it needs and does not hold once, and sends none twice; messages of one round are at most `staging_bytes` each
    way. `nodes[p]` is the node of process p, None one for all: no byte enters a node twice, nor one that has it.
    Processes of the source tell their `progress` (step, data position, seed), alike; the others learn it. Raises
    ConfigError on every process, before anything is changed, with all that keeps target from being made of source.
    """
    progress = _agreed(source, target, progress=progress, group=group)
    process = 0 if group is None else dist.get_rank(group)
    new = afresh(source.held, target.held)
    wanted = {name: holding for name, holding in target.held.items() if name not in new}
    least = least_bytes(source.held, wanted)
    hops = rounds(routes(source.held, wanted, nodes=nodes), staging_bytes=staging_bytes)
    counted = transfer(
        Side(held=source.held, tensors=source.tensors, process=process),
        Side(held=wanted, tensors=target.tensors, process=process),
        hops,
        group=group,
    )
    assert counted.received_bytes == least.get(process, 0), "a process is sent what it needs and does not hold, once"
    _finish(source, target)
    return Moved(counted=counted, least_bytes=sum(least.values()), rounds=len(hops), progress=progress)


def move_through(
    folder: Path,
    source: State,
    target: State,
    *,
    group: dist.ProcessGroup | None,
    progress: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """As `move`, through files in `folder`, which every process sees; returns the progress that the source told."""
    progress = _agreed(source, target, progress=progress, group=group)
    process = 0 if group is None else dist.get_rank(group)
    kept = {n: x for n, x in source.tensors.items() if isinstance(x, DTensor) or process in source.held[n].parts}
    write(kept, folder, group=group)
    new = afresh(source.held, target.held)
    read({name: x for name, x in target.tensors.items() if name not in new}, folder, group=group)
    _finish(source, target)
    return progress


def _state(held: Mapping[str, Holding], found: Sequence[tuple[str, Tensor]]) -> State:
    tensors: dict[str, Tensor] = {}
    for name, x in found:
        tensors.setdefault(name, x)
    return State(
        held=held,
        tensors={name: x for name, x in tensors.items() if not name.startswith(RESIDUAL)},
        copies=tuple((name, x) for name, x in found if x is not tensors[name]),
        residuals={name: x for name, x in tensors.items() if name.startswith(RESIDUAL)},
    )


def _agreed(
    source: State, target: State, *, progress: Mapping[str, Any] | None, group: dist.ProcessGroup | None
) -> Mapping[str, Any] | None:
    """What the source's processes tell of their progress. Raises ConfigError on all where any finds a problem."""
    process = 0 if group is None else dist.get_rank(group)
    problems = [*unfit(source.held, target.held)]
    for side, state in (("source", source), ("target", target)):
        problems += _misheld(state, process=process, side=side)
    told = _gathered((digest(source.held), digest(target.held), problems, progress), group)
    every = list(dict.fromkeys(problem for _, _, found, _ in told for problem in found))
    if len({(ours, theirs) for ours, theirs, _, _ in told}) > 1:
        every.append(Problem(what="processes see unlike plans", where="state", fix="give all of them the same two"))
    known = [entry for _, _, _, entry in told if entry is not None]
    if any(entry != known[0] for entry in known):
        every.append(Problem(what="processes of the source stand at unlike steps", where="state"))
    if every:
        raise ConfigError(every)
    return known[0] if known else None


def _misheld(state: State, *, process: int, side: str) -> list[Problem]:
    """Where the tensors of this process are not what `state` says of it."""
    problems = []
    for name, holding in state.held.items():
        box = holding.parts.get(process)
        if box is None:
            continue
        here = state.tensors.get(name)
        found = None if here is None else box_of(here)
        kind = "" if here is None else str(here.dtype).removeprefix("torch.")
        if found != box or kind != holding.dtype:
            what = f"{name} of the {side} is {_words(here)} on process {process}, not {box.sizes} {holding.dtype}"
            problems.append(Problem(what=what, where="state", fix="give the model and optimizer of that design"))
    return problems[:MOST_TOLD]


def _finish(source: State, target: State) -> None:
    """Second copies on this process equal the first; what another plan's rounding left is of no use, and state of
    parameters that were frozen begins."""
    with torch.no_grad():
        for name in afresh(source.held, target.held) & target.tensors.keys():
            local_part(target.tensors[name]).zero_()
        for name, copy in target.copies:
            copy.copy_(target.tensors[name])
        for name, left in target.residuals.items():
            if name in source.residuals:
                left.copy_(source.residuals[name])
            else:
                left.zero_()


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every process gave, in the group's order. Collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _words(x: Tensor | None) -> str:
    return "missing" if x is None else f"{box_of(x).sizes} {str(x.dtype).removeprefix('torch.')}"
