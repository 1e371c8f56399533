"""What Muon exchanges so that each matrix is whole on one of the ranks that share it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshwright.cost.traffic_groups import Group
from meshwright.cost.traffic_parameters import Cut, Part
from meshwright.spec.optimizer import Muon, Optimizer, Treatment, treatment

Exchanged = tuple[Group, float]
Piece = tuple[tuple[int, ...], tuple[Cut, ...]]  # a matrix's part on this rank, and the cuts through it


def exchanges(parts: Sequence[Part], spec: Optimizer) -> Iterator[Exchanged]:
    """(group, elements of the larger side) of every all-to-all of the first rank of all groups."""
    chosen: dict[Treatment, list[Part]] = {}
    for part in parts:
        chosen.setdefault(treatment(spec, part.name), []).append(part)
    for how, alike in chosen.items():
        if isinstance(how.rule, Muon):
            for turn in _turns([piece for part in alike for piece in _pieces(part)]):
                yield from _together(turn)


def _pieces(part: Part) -> list[Piece]:
    """Cuts count dims from the end; every expert of a stack is a matrix of its own."""
    dims = len(part.shape)
    path = tuple(
        Cut(dim=cut.dim - dims, extent=cut.extent, group=cut.group) for cut in part.cuts if cut.dim >= dims - 2
    )
    if dims > 2 and path:
        return [(part.shape[1:], path)] * part.shape[0]
    return [(part.shape, path)]


def _turns(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Matrices of one turn go through the same groups, and are as many as ranks share them."""
    shared: dict[tuple[Group, ...], list[Piece]] = {}
    for piece in pieces:
        shared.setdefault(tuple(cut.group for cut in piece[1]), []).append(piece)
    found = []
    for groups, alike in shared.items():
        alike.sort(key=_shape)
        ranks = math.prod(group.size for group in groups)
        found += [alike[start : start + ranks] for start in range(0, len(alike), ranks)]
    return found


def _shape(piece: Piece) -> tuple[int, ...]:
    """Of the whole matrix."""
    shape = list(piece[0])
    for cut in piece[1]:
        shape[cut.dim] = cut.extent
    return tuple(shape)


def _together(turn: Sequence[Piece]) -> Iterator[Exchanged]:
    """There and back through the first group of all, and between them through the others."""
    if not turn or not turn[0][1]:
        return
    group = turn[0][1][0].group
    mine = turn[:: group.size]
    wholes = [_joined(piece) for piece in mine]
    sent = sum(math.prod(shape) for shape, _ in turn)
    arrived = sum(math.prod(shape) for shape, _ in wholes)
    yield group, max(sent, arrived)
    yield from _together(wholes)
    yield group, max(sent, arrived)


def _joined(piece: Piece) -> Piece:
    """Whole along its first cut."""
    shape, (first, *others) = list(piece[0]), piece[1]
    shape[first.dim] = first.extent
    return tuple(shape), tuple(others)
