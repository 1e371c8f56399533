"""Gradients of matrices as products of two thin factors, with what that leaves out sent later.

What travels is linear in the gradient for factors that all ranks hold alike, so that an all-reduce sums it. Vectors and
matrices that factors would not make smaller travel whole beside the first factor, in the same flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.spec.compression import Factors, factors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A parameter's place in a bucket, and how its matrices are factored."""

    start: int
    stop: int
    factors: Factors | None


class _Pieces:
    """The parameters of one bucket, those that are factored and those that travel whole."""

    def __init__(self, shapes: Sequence[torch.Size], *, rank: int) -> None:
        found, start = [], 0
        for shape in shapes:
            found.append(_Piece(start=start, stop=start + shape.numel(), factors=factors(shape, rank=rank)))
            start += shape.numel()
        self.whole = [piece for piece in found if piece.factors is None]
        self.factored = [(piece, piece.factors) for piece in found if piece.factors is not None]

    def of(self, flat: Tensor) -> list[Tensor]:
        """What travels whole."""
        return [flat[piece.start : piece.stop] for piece in self.whole]

    def matrices(self, flat: Tensor) -> Iterator[Tensor]:
        """Views (count, rows, columns) of what is factored."""
        for piece, each in self.factored:
            yield flat[piece.start : piece.stop].view(each.count, each.rows, each.columns)

    def held(self, of: str) -> list[int]:
        """`size`, `left` or `right` of every factored piece."""
        return [getattr(each, of) for _, each in self.factored]

    def shaped(self, flat: Tensor, of: str) -> list[Tensor]:
        """Views of a tensor that holds what `of` says of all pieces, one after another."""
        return [
            piece.view(each.count, -1, each.columns if of == "size" else each.rank)
            for piece, (_, each) in zip(flat.split(self.held(of)), self.factored, strict=True)
        ]


class PowerSgdReduction:
    """PowerSGD (1905.13727): P = M Q summed and made orthonormal, then Q = M' P summed; every rank has P Q'.

    M is the gradient and what was left of earlier ones; Q of one step begins the next (one iteration of the power
    method a step). It is made orthonormal too, so that directions a gradient lacks once are not lost for good.
    """

    def __init__(self, like: Tensor, shapes: Sequence[torch.Size], *, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._pieces = group, _Pieces(shapes, rank=rank)
        self._left = like.new_zeros(sum(self._pieces.held("size")))
        self._columns = like.new_zeros(sum(self._pieces.held("right")))
        self._sent: Tensor | None = None
        self._rows: list[Tensor] = []
        self._work: dist.Work | None = None

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self._left, self._columns) if self._pieces.factored else ()

    def start(self, flat: Tensor, *, step: int) -> None:
        owed, columns = self._owed(flat), self._pieces.shaped(self._columns, "right")
        rows = [(m @ orthonormal(q)).view(-1) for m, q in zip(owed, columns, strict=True)]
        self._sent = torch.cat([*rows, *self._pieces.of(flat)])
        self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)

    def turn(self) -> None:
        assert self._sent is not None
        assert self._work is not None
        self._work.wait()
        if not self._pieces.factored:
            return
        owed, columns = self._pieces.shaped(self._left, "size"), self._pieces.shaped(self._columns, "right")
        rows = self._sent[: sum(self._pieces.held("left"))]
        self._rows = [orthonormal(p) for p in self._pieces.shaped(rows, "left")]
        for m, p, q in zip(owed, self._rows, columns, strict=True):
            torch.matmul(m.mT, p, out=q)
            m.baddbmm_(p, q.mT, alpha=-1)
        self._work = dist.all_reduce(self._columns, group=self._group, async_op=True)

    def finish(self, flat: Tensor) -> None:
        assert self._sent is not None
        assert self._work is not None
        self._work.wait()
        columns = self._pieces.shaped(self._columns, "right")
        for m, p, q in zip(self._pieces.matrices(flat), self._rows, columns, strict=True):
            torch.matmul(p, q.mT, out=m)
        _put(self._pieces.of(flat), self._sent[sum(self._pieces.held("left")) :])
        self._sent, self._work, self._rows = None, None, []

    def _owed(self, flat: Tensor) -> list[Tensor]:
        owed = self._pieces.shaped(self._left, "size")
        for left, m in zip(owed, self._pieces.matrices(flat), strict=True):
            left.add_(m)
        return owed


class AcpSgdReduction:
    """ACP-SGD (2306.08881): in even steps P = M Q is summed, in odd ones Q = M' P, each for the other factor made
    orthonormal as the step before left it; every rank has P Q'. One all-reduce a step."""

    def __init__(self, like: Tensor, shapes: Sequence[torch.Size], *, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._pieces = group, _Pieces(shapes, rank=rank)
        self._left = like.new_zeros(sum(self._pieces.held("size")))
        self._factors = {of: like.new_zeros(sum(self._pieces.held(of))) for of in ("left", "right")}
        self._of = "left"
        self._given: list[Tensor] = []
        self._sent: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self._left, *self._factors.values()) if self._pieces.factored else ()

    def start(self, flat: Tensor, *, step: int) -> None:
        self._of, other = ("left", "right") if step % 2 == 0 else ("right", "left")
        self._given = [orthonormal(x) for x in self._pieces.shaped(self._factors[other], other)]
        made = []
        owed = self._pieces.shaped(self._left, "size")
        for left, m, given in zip(owed, self._pieces.matrices(flat), self._given, strict=True):
            left.add_(m)
            turned = left if self._of == "left" else left.mT
            made.append(turned @ given)
            turned.baddbmm_(made[-1], given.mT, alpha=-1)
        self._sent = torch.cat([*(x.view(-1) for x in made), *self._pieces.of(flat)])
        self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)

    def turn(self) -> None:
        """Nothing: what was sent is all."""

    def finish(self, flat: Tensor) -> None:
        assert self._sent is not None
        assert self._work is not None
        self._work.wait()
        summed = self._factors[self._of]
        summed.copy_(self._sent[: summed.numel()])
        made = self._pieces.shaped(summed, self._of)
        for m, x, given in zip(self._pieces.matrices(flat), made, self._given, strict=True):
            left, right = (x, given) if self._of == "left" else (given, x)
            torch.matmul(left, right.mT, out=m)
        _put(self._pieces.of(flat), self._sent[summed.numel() :])
        self._sent, self._work, self._given = None, None, []


def orthonormal(x: Tensor) -> Tensor:
    """Orthonormal columns that span those of x (count, rows, rank) at the least; of zeros, the first unit vectors."""
    return torch.linalg.qr(x)[0]


def _put(pieces: Sequence[Tensor], flat: Tensor) -> None:
    for piece, value in zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(value)
