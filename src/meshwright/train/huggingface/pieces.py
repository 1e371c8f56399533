"""Doing what a table says: any box of a parameter from stored tensors, and any stored tensor from parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.catalog.huggingface.tensors import Cut, Piece, Table

Look = Callable[[str], Tensor]


def read_box(into: Tensor, name: str, *, start: Sequence[int], table: Table, stored: Look) -> None:
    """`into` holds the box of parameter `name` that begins at `start` and has the shape of `into`.

    Only what the box needs of the `stored` tensors is looked at. Values take the type of `into`, in which offsets
    are added.
    """
    pieces = table.of_ours[name]
    if pieces[0].index is None:
        _read(into, pieces[0], start, stored)
        return
    for row, piece in enumerate(pieces[start[0] : start[0] + into.shape[0]]):
        _read(into[row], piece, start[1:], stored)


def make_stored(name: str, *, dtype: torch.dtype, table: Table, parameter: Look) -> Tensor:
    """The stored tensor `name` in `dtype`, made of parameters on the processor."""
    made = torch.empty(table.theirs[name], dtype=dtype)
    for piece in table.of_theirs[name]:
        whole = parameter(piece.ours)
        ours = whole if piece.index is None else whole[piece.index]
        if piece.offset:
            ours = ours - piece.offset
        place = _turned(made, piece)
        if piece.planes is None:
            place.copy_(ours)
        else:
            place.index_copy_(0, torch.tensor(piece.planes.order(place.shape[0])), ours.to(dtype))
    return made


def _read(into: Tensor, piece: Piece, start: Sequence[int], stored: Look) -> None:
    view = _turned(stored(piece.theirs), piece)
    sizes = into.shape
    if piece.planes is not None:
        rows = piece.planes.order(view.shape[0])[start[0] : start[0] + sizes[0]]
        view = view.index_select(0, torch.tensor(rows, dtype=torch.int64))
        start = (0, *start[1:])
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        view = view.narrow(dim, first, size)
    into.copy_(view)
    if piece.offset:
        into.add_(piece.offset)


def _turned(whole: Tensor, piece: Piece) -> Tensor:
    """The cut of a stored tensor with its dims in our order: a view."""
    view = whole if piece.cut is None else _cut(whole, piece.cut)
    return view.transpose(-1, -2) if piece.transposed else view


def _cut(whole: Tensor, cut: Cut) -> Tensor:
    return whole[(slice(None),) * cut.dim + (slice(cut.start, cut.stop, cut.step),)]
