"""Muon over matrices that ranks share: each is made whole on one of them, which makes its momentum orthogonal.

Muon (2502.16982) needs whole matrices. Matrices of one shape are dealt to the ranks that share them in turn, exchanged
all-to-all, and go back as updates, so that no product is done twice among them; ranks that hold the same matrix (the
replicate axis) each do it. Every expert of a stack is a matrix of its own. What travels and multiplies is in the
precision that the model multiplies in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.clip import local_part
from meshwright.parallel.shards import Cut, cuts, zeros_as
from meshwright.spec.optimizer import Muon

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's own fifth-order iteration
_SCALE = 0.2  # root mean square of an update's elements (2502.16982, section 2.2)
_EPSILON = 1e-7


class MuonRule:
    """State is `momentum`, laid out as the parameter is."""

    def __init__(self, spec: Muon, *, compute: torch.dtype) -> None:
        self._spec, self._compute = spec, compute

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum": zeros_as(parameter)}

    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None:
        """Every matrix took one step. Collective over the ranks that share matrices."""
        pieces: list[Piece] = []
        for parameter, state in zip(held, states, strict=True):
            assert parameter.grad is not None
            gradient, momentum = local_part(parameter.grad), local_part(state["momentum"])
            momentum.mul_(self._spec.momentum).add_(gradient)
            local = local_part(parameter.detach())
            local.mul_(1.0 - rate * weight_decay)
            pieces += _pieces(parameter, local, gradient=gradient, momentum=momentum)
        for turn in turns(pieces):
            ahead = [p.gradient.add(p.momentum, alpha=self._spec.momentum).to(self._compute) for p in turn]
            updates = _together(ahead, [piece.path for piece in turn], steps=self._spec.steps)
            for piece, update in zip(turn, updates, strict=True):
                piece.parameter.add_(update.to(piece.parameter.dtype), alpha=-rate * _SCALE * piece.scale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """This rank's part of one matrix, or of a stack of uncut ones; `scale` is the root of its longer side."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    path: tuple[Cut, ...]
    scale: float

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole matrix: the innermost cut of a dim tells all of it."""
        shape = list(self.parameter.shape)
        for cut in self.path:
            shape[cut.dim] = cut.extent
        return tuple(shape)


def _pieces(parameter: Tensor, local: Tensor, *, gradient: Tensor, momentum: Tensor) -> list[Piece]:
    path, scale = matrix_cuts(parameter), math.sqrt(max(parameter.shape[-2:]))
    parts = [(local, gradient, momentum)]
    if local.dim() > 2 and path:
        parts = list(zip(local.unbind(0), gradient.unbind(0), momentum.unbind(0), strict=True))
    return [Piece(parameter=p, gradient=g, momentum=m, path=path, scale=scale) for p, g, m in parts]


def matrix_cuts(x: Tensor) -> tuple[Cut, ...]:
    """The cuts that go through matrices: those of the last two dims, counted from the end."""
    first = x.dim() - 2
    return tuple(Cut(dim=cut.dim - x.dim(), extent=cut.extent, group=cut.group) for cut in cuts(x) if cut.dim >= first)


def turns(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Matrices of one turn have one shape, but at the ends of a run, and go through the same groups.

    They are as many as ranks share them, so that each rank has one whole matrix at a time.
    """
    shared: dict[tuple[str, ...], list[Piece]] = {}
    for piece in pieces:
        shared.setdefault(tuple(cut.group.group_name for cut in piece.path), []).append(piece)
    found = []
    for alike in shared.values():
        alike.sort(key=lambda piece: piece.whole)
        ranks = math.prod(cut.group.size() for cut in alike[0].path)
        found += [alike[start : start + ranks] for start in range(0, len(alike), ranks)]
    return found


def newton_schulz(x: Tensor, *, steps: int) -> Tensor:
    """Near U V^T of each matrix U S V^T of x (..., rows, columns): after 5 steps singular values are 0.7 to 1.2."""
    a, b, c = _COEFFICIENTS
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _EPSILON)
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        mixed = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, mixed, x, beta=a)
    x = x.view(shape)
    return x.mT if turned else x


def _together(pieces: list[Tensor], paths: list[tuple[Cut, ...]], *, steps: int) -> list[Tensor]:
    """`newton_schulz` of the matrices of one turn, of which this rank has `pieces`: its parts of the results."""
    if not pieces or not paths[0]:
        return [newton_schulz(piece, steps=steps) for piece in pieces]
    first = [path[0] for path in paths]
    group = first[0].group
    mine = range(group.rank(), len(pieces), group.size())
    wholes = _to_owners(pieces, first)
    done = _together(wholes, [paths[index][1:] for index in mine], steps=steps)
    return _from_owners(done, pieces, first)


def _to_owners(pieces: list[Tensor], first: list[Cut]) -> list[Tensor]:
    """Matrix i is joined along its first cut on rank i modulo the group's size; those of this rank."""
    group = first[0].group
    ranks, rank = group.size(), group.rank()
    sent = [[pieces[index] for index in range(owner, len(pieces), ranks)] for owner in range(ranks)]
    mine = range(rank, len(pieces), ranks)
    shapes = [[_part(pieces[index], first[index], sender) for index in mine] for sender in range(ranks)]
    received = _exchange(sent, shapes, like=pieces[0], group=group)
    return [
        torch.cat([received[sender][place] for sender in range(ranks)], dim=first[index].dim)
        for place, index in enumerate(mine)
    ]


def _from_owners(wholes: list[Tensor], pieces: list[Tensor], first: list[Cut]) -> list[Tensor]:
    """The way back: this rank's part of every matrix, in the shapes of `pieces`."""
    group = first[0].group
    ranks, rank = group.size(), group.rank()
    mine = range(rank, len(pieces), ranks)
    parts = [
        whole.split([first[index].length(peer) for peer in range(ranks)], dim=first[index].dim)
        for whole, index in zip(wholes, mine, strict=True)
    ]
    sent = [[part[peer] for part in parts] for peer in range(ranks)]
    owned = [[tuple(pieces[index].shape) for index in range(owner, len(pieces), ranks)] for owner in range(ranks)]
    received = _exchange(sent, owned, like=pieces[0], group=group)
    return [received[index % ranks][index // ranks] for index in range(len(pieces))]


def _part(piece: Tensor, cut: Cut, rank: int) -> tuple[int, ...]:
    """The shape that `rank` has of the matrix of which this rank has `piece`."""
    shape = list(piece.shape)
    shape[cut.dim] = cut.length(rank)
    return tuple(shape)


def _exchange(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], *, like: Tensor, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """What every rank sent to this one, in `shapes`; `sent[r]` goes to rank r."""
    out = torch.cat([x.reshape(-1) for to in sent for x in to]) if any(sent) else like.new_empty(0)
    sizes = [[math.prod(shape) for shape in each] for each in shapes]
    into = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        into,
        out,
        output_split_sizes=[sum(each) for each in sizes],
        input_split_sizes=[sum(x.numel() for x in to) for to in sent],
        group=group,
    )
    pieces = iter(into.split([size for each in sizes for size in each]))
    return [[next(pieces).view(shape) for shape in each] for each in shapes]
