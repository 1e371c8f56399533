"""Tensors of a Hugging Face folder as parameters of our whole model, and back: described, not done."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Elements start, start + step, ... below stop of dim `dim`."""

    dim: int
    start: int
    stop: int
    step: int = 1

    @property
    def length(self) -> int:
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """Rows of heads of `size` rows each, of which `dims` from `start` on are rotary and stored plane by plane.

    Stored so, rows 2 i and 2 i + 1 of the rotary part turn together (RoFormer, 2104.09864, as published); we turn
    rows i and i + dims / 2, the order that Hugging Face's llama has. Queries and keys in either order give the same
    scores.
    """

    size: int
    start: int
    dims: int

    def order(self, rows: int) -> tuple[int, ...]:
        """Where each of our `rows` rows is stored."""
        half = self.dims // 2
        turned = (*range(0, self.dims, 2), *range(1, self.dims, 2)) if half else ()
        head = (
            *range(self.start),
            *(self.start + row for row in turned),
            *range(self.start + self.dims, self.size),
        )
        return tuple(first + row for first in range(0, rows, self.size) for row in head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a parameter of ours that is a box of a stored tensor.

    Ours is `ours[index]` (all of it where `index` is None) of `shape`. Stored it is the `cut` of `theirs`, with its
    last two dims swapped when `transposed`, its rows in the order of `planes`, and less `offset` each. An `exact` one
    is stored in fp32 whatever the type of the others.
    """

    ours: str
    theirs: str
    shape: Shape
    index: int | None = None
    cut: Cut | None = None
    transposed: bool = False
    planes: Planes | None = None
    offset: float = 0.0
    exact: bool = False

    @property
    def stored_shape(self) -> Shape:
        """That of the cut."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape


@dataclass(frozen=True, kw_only=True)
class Table:
    """All pieces of a model, in the order of its parameters.

    `left_out` are patterns of stored tensors that hold nothing, such as buffers, and `rest` of those that hold what is
    not trained here: encoder towers, indexers of sparse attention, layers that predict further tokens. `prefix` begins
    every stored name but in folders that leave it out.
    """

    pieces: tuple[Piece, ...]
    left_out: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    prefix: str = ""

    @cached_property
    def of_ours(self) -> Mapping[str, tuple[Piece, ...]]:
        """Pieces by the parameter that they are of, in the order of its rows."""
        return _grouped((piece.ours, piece) for piece in self.pieces)

    @cached_property
    def of_theirs(self) -> Mapping[str, tuple[Piece, ...]]:
        return _grouped((piece.theirs, piece) for piece in self.pieces)

    @cached_property
    def ours(self) -> Mapping[str, Shape]:
        """Shape of every parameter."""
        return {name: _ours(pieces) for name, pieces in self.of_ours.items()}

    @cached_property
    def theirs(self) -> Mapping[str, Shape]:
        """Shape of every stored tensor."""
        return {name: _theirs(pieces) for name, pieces in self.of_theirs.items()}

    def leaves_out(self, name: str) -> bool:
        return _matches(name, self.left_out)

    def is_rest(self, name: str) -> bool:
        return _matches(name, self.rest)

    def within(self, prefix: str, *, rest: tuple[str, ...]) -> Table:
        """The same where every stored name begins with `prefix`, beside more that is not trained here."""
        return Table(
            pieces=tuple(replace(piece, theirs=f"{prefix}{piece.theirs}") for piece in self.pieces),
            left_out=tuple(re.escape(prefix) + pattern for pattern in self.left_out),
            rest=(*(re.escape(prefix) + pattern for pattern in self.rest), *rest),
        )


@dataclass(slots=True)
class Pieces:
    """Collects pieces of one model. `ours` and `theirs` begin the names of what is added."""

    found: list[Piece] = field(default_factory=list)
    ours: str = ""
    theirs: str = ""

    def under(self, ours: str, theirs: str) -> Pieces:
        """A collector of the same pieces whose names begin with these as well."""
        return Pieces(self.found, f"{self.ours}{ours}", f"{self.theirs}{theirs}")

    def add(
        self,
        ours: str,
        theirs: str,
        shape: Shape,
        *,
        index: int | None = None,
        cut: Cut | None = None,
        transposed: bool = False,
        planes: Planes | None = None,
        offset: float = 0.0,
        exact: bool = False,
    ) -> None:
        self.found.append(
            Piece(
                ours=self.ours + ours,
                theirs=self.theirs + theirs,
                shape=shape,
                index=index,
                cut=cut,
                transposed=transposed,
                planes=planes,
                offset=offset,
                exact=exact,
            )
        )

    def matrix(
        self,
        ours: str,
        theirs: str,
        shape: tuple[int, int],
        *,
        bias: bool = False,
        planes: Planes | None = None,
        transposed: bool = False,
        cut: Cut | None = None,
    ) -> None:
        """A matrix (outputs, inputs) and, when it has one, its bias; `cut` takes these outputs of theirs."""
        weight_cut = Cut(dim=1, start=cut.start, stop=cut.stop) if cut and transposed else cut
        self.add(f"{ours}.weight", f"{theirs}.weight", shape, planes=planes, transposed=transposed, cut=weight_cut)
        if bias:
            self.add(f"{ours}.bias", f"{theirs}.bias", shape[:1], planes=planes, cut=cut)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _grouped(entries: Iterable[tuple[str, Piece]]) -> Mapping[str, tuple[Piece, ...]]:
    found: dict[str, list[Piece]] = {}
    for name, piece in entries:
        found.setdefault(name, []).append(piece)
    return MappingProxyType({name: tuple(pieces) for name, pieces in found.items()})


def _ours(pieces: Sequence[Piece]) -> Shape:
    first = pieces[0]
    return first.shape if first.index is None else (len(pieces), *first.shape)


def _theirs(pieces: Sequence[Piece]) -> Shape:
    shape = list(pieces[0].stored_shape)
    if pieces[0].cut is not None:
        shape[pieces[0].cut.dim] = max(piece.cut.stop for piece in pieces if piece.cut is not None)
    return tuple(shape)
