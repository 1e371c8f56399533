"""Sums of products of divided tensors by Einstein's notation: the ranks sum where a divided letter is summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.divided import Divided, Division, Indivisible, Unlike, Use, origins_of, own, parts_among
from meshwright.parallel.divided_products import whole
from meshwright.parallel.torch_compat import plain

_UNNAMED = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(equation: Any, *operands: Any) -> Tensor:
    """torch.einsum of `operands`, some divided, all of them at one letter."""
    tensors: Sequence[Any] = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    origins = origins_of(tensors)
    terms, result = letters(equation, tensors)
    first = parts_among(tensors)[0]
    place = next(place for place, x in enumerate(tensors) if x is first)
    letter, division = terms[place][first.division.dim], first.division
    if any(term.count(letter) > 1 for term in terms):
        raise Indivisible("einsum of a diagonal of divided features", origins=origins)
    near = [_near(x, term, letter, like=first, origins=origins) for x, term in zip(tensors, terms, strict=True)]
    local = torch.einsum(f"{','.join(terms)}->{result}", *near)
    if letter not in result:
        return first.axis.leave(local)
    at = Division(dim=result.index(letter), pieces=division.pieces, use=division.use)
    found = first.made(local, at, origins=origins)
    return whole(found) if division.use is Use.VOCABULARY else found


def with_matrix(args: tuple[Any, ...], decided: Callable[..., tuple[Tensor, Any]]) -> tuple[Any, ...] | None:
    """Arguments of einsum with what `decided` makes of the matrix that the last dim of the other operand is multiplied
    by; None where it is no such product."""
    if len(args) != 3 or not isinstance(args[0], str) or args[2].ndim != 2 or not args[1].ndim:
        return None
    (features, matrix), result = letters(args[0], args[1:])
    last, columns = features[-1], matrix.replace(features[-1], "")
    if len(columns) != 1 or columns in features or columns not in result or last in result:
        return None
    return args[0], args[1], decided(args[1], args[2], None, columns=matrix.index(columns))[0]


def letters(equation: Any, tensors: Sequence[Tensor]) -> tuple[list[str], str]:
    """The letters of every tensor's dims and of the result's; those that `...` stands for are capitals."""
    if not isinstance(equation, str) or any(letter in _UNNAMED for letter in equation):
        raise Indivisible("einsum is divided only with small letters", origins=origins_of(tensors))
    left, arrow, right = equation.replace(" ", "").partition("->")
    unnamed = [x.ndim - len(term.replace("...", "")) for x, term in zip(tensors, left.split(","), strict=True)]
    most = _UNNAMED[: max(unnamed)]
    terms = [
        term.replace("...", most[len(most) - count :]) for term, count in zip(left.split(","), unnamed, strict=True)
    ]
    if arrow:
        return terms, right.replace("...", most)
    times = Counter("".join(terms))
    return terms, most + "".join(sorted(letter for letter in times if times[letter] == 1 and letter not in most))


def _near(x: Tensor, term: str, letter: str, *, like: Divided, origins: frozenset[str]) -> Tensor:
    """What this rank has of x along `letter`."""
    if isinstance(x, Divided):
        if term[x.division.dim] != letter or x.division.pieces != like.division.pieces:
            raise Unlike("einsum of tensors divided in two ways", origins=origins)
        return plain(x)
    entered = like.axis.enter(x)
    if letter not in term or x.shape[term.index(letter)] == 1:
        return entered
    return own(entered, Division(dim=term.index(letter), pieces=like.division.pieces), like.axis)
