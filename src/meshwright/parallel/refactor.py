"""Refactor: the state of a model becomes that of the same model with other ranks, under any plans of both.

A matrix W that gets a rank becomes U V by its truncated singular value decomposition, balanced: U sqrt(S), sqrt(S) V^T
(spectral initialisation, 2105.01029). Factors that are there are balanced anew from themselves (2505.22922). Each
matrix is whole on one process for as long as that takes, and no process has two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.holdings import OPTIMIZER, PARAMETERS, Holding, whole
from meshwright.nn.low_rank import balanced_factors
from meshwright.parallel.clip import local_part
from meshwright.parallel.portable import Portable
from meshwright.parallel.relocate import State, move
from meshwright.spec.ranks import factor_names

Pair = tuple[Tensor, Tensor]  # U (m, r) and V (r, n)


def rebalanced(up: Tensor, down: Tensor) -> Pair:
    """Factors of the same product with equal norms of every column of U and its row of V, from two thin QR and the
    decomposition of their small core (r, r)."""
    left, upper = torch.linalg.qr(up.to(torch.float64))
    right, lower = torch.linalg.qr(down.to(torch.float64).T)
    inner, outer = balanced_factors(upper @ lower.T, len(down))
    return (left @ inner).to(up.dtype), (outer @ right.T).to(down.dtype)


def refactor(
    source: State,
    target: State,
    *,
    ranks: Mapping[str, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """`target` holds what `source` does, its matrices of `ranks` as fresh factors whose optimizer state begins.

    `source` has those as whole matrices, or as factors of the same rank. The two may be one, which is changed in place.
    Collective over `group`, which has the processes of both. Raises ConfigError, as `move` does, where other tensors
    differ.
    """
    fresh = {name for matrix in ranks for name in factor_names(matrix)}
    if target is not source:
        kept = [name for name in target.held if _parameter(name) not in fresh]
        left = {f"{matrix}.weight" for matrix in ranks} | fresh
        given = [name for name in source.held if _parameter(name) not in left]
        move(_only(source, given, residuals=False), _only(target, kept), group=group)
    processes = 1 if group is None else dist.get_world_size(group)
    every = list(ranks.items())
    for first in range(0, len(every), processes):
        together = dict(every[first : first + processes])
        _refactor_some(source, target, together, group=group, device=device)
    with torch.no_grad():
        for name, x in target.tensors.items():
            if name.startswith(OPTIMIZER) and _parameter(name) in fresh:
                local_part(x).zero_()
    target.own.settle()


def _refactor_some(
    source: State, target: State, ranks: Mapping[str, int], *, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """At most one matrix for each process, which has all of it and makes its factors."""
    process = 0 if group is None else dist.get_rank(group)
    owners = {matrix: owner for owner, matrix in enumerate(ranks)}
    names = {matrix: _source_names(matrix, source) for matrix in ranks}
    owned = {name: owners[matrix] for matrix, found in names.items() for name in found}
    gathered = _owned(source, owned, process=process, device=device)
    move(_only(source, owned, residuals=False), gathered, group=group)
    made: dict[str, Tensor] = {}
    for matrix, rank in ranks.items():
        if owners[matrix] == process:
            found = [gathered.tensors[name] for name in names[matrix]]
            factors = balanced_factors(found[0], rank) if len(found) == 1 else rebalanced(found[0], found[1])
            own = [f"{PARAMETERS}{name}" for name in factor_names(matrix)]
            made |= dict(zip(own, (factor.contiguous() for factor in factors), strict=True))
    wanted = {f"{PARAMETERS}{name}": owners[matrix] for matrix in ranks for name in factor_names(matrix)}
    held = {name: _at(target.held[name], owner) for name, owner in wanted.items()}
    move(State(held=held, own=Portable(tensors=made)), _only(target, wanted), group=group)


def _source_names(matrix: str, source: State) -> tuple[str, ...]:
    """What `source` calls the matrix: itself, or its factors."""
    one = f"{PARAMETERS}{matrix}.weight"
    return (one,) if one in source.held else tuple(f"{PARAMETERS}{name}" for name in factor_names(matrix))


def _owned(source: State, owners: Mapping[str, int], *, process: int, device: torch.device) -> State:
    """Room for whole tensors, each on its owner alone."""
    held = {name: _at(source.held[name], owner) for name, owner in owners.items()}
    room = {
        name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device=device)
        for name, one in held.items()
        if owners[name] == process
    }
    return State(held=held, own=Portable(tensors=room))


def _at(holding: Holding, owner: int) -> Holding:
    return replace(holding, parts={owner: whole(holding.shape)})


def _only(state: State, names: Iterable[str], *, residuals: bool = True) -> State:
    """Of a state the tensors `names`, whose moments nobody packs."""
    chosen: Collection[str] = frozenset(names)
    own = Portable(
        tensors={name: x for name, x in state.own.tensors.items() if name in chosen},
        copies=_among(state.own.copies, chosen),
        residuals=state.own.residuals if residuals else {},
    )
    return State(held={name: one for name, one in state.held.items() if name in chosen}, own=own)


def _among(copies: Sequence[tuple[str, Tensor]], names: Collection[str]) -> tuple[tuple[str, Tensor], ...]:
    return tuple((name, x) for name, x in copies if name in names)


def _parameter(name: str) -> str:
    """The parameter that a tensor of a state is, or is of: `layers.0.mixer.query.weight` of its moments too."""
    if name.startswith(PARAMETERS):
        return name.removeprefix(PARAMETERS)
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]
