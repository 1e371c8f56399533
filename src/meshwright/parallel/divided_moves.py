"""What happens to a division when a tensor is viewed, permuted, cut or joined; sizes are those of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.divided import Divided, Division, Indivisible, beside, origins_of, parts_among
from meshwright.parallel.torch_compat import plain


def even_cuts(count: int) -> tuple[Fraction, ...]:
    """Where `count` equal pieces meet."""
    return tuple(Fraction(place, count) for place in range(1, count))


def refuse(x: Divided, reason: str, *, cuts: tuple[Fraction, ...] = ()) -> Indivisible:
    return Indivisible(reason, origins=x.origins, cuts=cuts)


def place_of(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def moved(x: Divided, local: Tensor, dim: int) -> Divided:
    """`local`, whose dim `dim` is what x's divided dim was."""
    return x.made(local, Division(dim=dim, pieces=x.division.pieces, use=x.division.use))


def view(x: Divided, shape: Sequence[int]) -> Divided:
    """x in `shape`, a shape of the whole: the outermost factor of the divided dim is divided (1909.08053 divides heads
    so), or the innermost run of a merged one."""
    old = list(x.whole_shape())
    new = _resolved(list(shape), prod(old))
    division = _viewed(x, old, new)
    new[division.dim] //= x.axis.size
    return x.made(plain(x).reshape(new), division)


def _resolved(shape: list[int], total: int) -> list[int]:
    if -1 in shape:
        known = -prod(shape)
        shape[shape.index(-1)] = total // known
    return shape


def _viewed(x: Divided, old: list[int], new: list[int]) -> Division:
    """Where the divided dim of `old` lies in `new`, and its pieces there."""
    dim, pieces = x.division.dim, x.division.pieces
    before, there = _run(old, new, dim)
    sizes, outer = new[slice(*there)], prod(old[before[0] : dim])
    if before[1] - before[0] == len(sizes) == 1:
        return Division(dim=there[0], pieces=pieces)
    if len(set(pieces)) > 1:
        raise refuse(x, f"a view as {tuple(new)} mixes unlike pieces")
    # `repeats` alike runs of `run` elements, each of which the ranks share in order.
    repeats, run = outer * len(pieces), pieces[0] * prod(old[dim + 1 : before[1]])
    cuts: tuple[Fraction, ...] = ()
    for place in reversed(range(len(sizes))):
        ahead, behind = prod(sizes[:place]), prod(sizes[place + 1 :])
        if repeats % ahead or run % behind:
            continue
        piece = run // behind
        if piece % x.axis.size == 0:
            return Division(dim=there[0] + place, pieces=(piece,) * (repeats // ahead))
        cuts = even_cuts(piece) if repeats == 1 and piece > 1 else cuts
    raise refuse(x, f"a view as {tuple(new)} does not divide by {x.axis.size}", cuts=cuts)


def _run(old: list[int], new: list[int], dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The smallest runs of dims of `old` and `new` of one size that hold `dim` and align."""
    i = j = 0
    while i < len(old):
        start, there = i, j
        one, other = old[i], 1
        i += 1
        if one == 1:
            if start == dim:
                raise Indivisible("a divided dim of one")
            continue
        while one != other:
            if other < one:
                other *= new[j]
                j += 1
            else:
                one *= old[i]
                i += 1
        if start <= dim < i:
            return (start, i), (there, j)
    raise AssertionError("a dim outside of its tensor")


def permute(x: Divided, dims: Sequence[int]) -> Divided:
    ndim = plain(x).ndim
    places = [place_of(dim, ndim) for dim in dims]
    return moved(x, plain(x).permute(places), places.index(x.division.dim))


def transpose(x: Divided, one: int, other: int) -> Divided:
    places = list(range(plain(x).ndim))
    places[one], places[other] = places[other], places[one]
    return permute(x, places)


def unsqueeze(x: Divided, dim: int) -> Divided:
    dim = place_of(dim, plain(x).ndim + 1)
    return moved(x, plain(x).unsqueeze(dim), x.division.dim + (dim <= x.division.dim))


def squeeze(x: Divided, dim: int) -> Divided:
    dim = place_of(dim, plain(x).ndim)
    if dim == x.division.dim:
        return x
    local = plain(x).squeeze(dim)
    gone = local.ndim < plain(x).ndim
    return moved(x, local, x.division.dim - (gone and dim < x.division.dim))


def flatten(x: Divided, start: int = 0, end: int = -1) -> Divided:
    shape, ndim = list(x.whole_shape()), plain(x).ndim
    start, end = place_of(start, ndim), place_of(end, ndim)
    return view(x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(x: Divided, dim: int, sizes: Sequence[int]) -> Divided:
    shape = list(x.whole_shape())
    dim = place_of(dim, len(shape))
    return view(x, [*shape[:dim], *_resolved(list(sizes), shape[dim]), *shape[dim + 1 :]])


def expand(x: Divided, shape: Sequence[int]) -> Divided:
    """x broadcast to `shape`, a shape of the whole."""
    sizes = list(shape)
    dim = x.division.dim + len(sizes) - plain(x).ndim
    if sizes[dim] not in (-1, x.division.total):
        raise refuse(x, "a divided dim that is expanded")
    sizes[dim] = -1
    return moved(x, plain(x).expand(sizes), dim)


def repeat_interleave(x: Divided, repeats: int, dim: int) -> Divided:
    dim = place_of(dim, plain(x).ndim)
    local = plain(x).repeat_interleave(repeats, dim)
    times = repeats if dim == x.division.dim else 1
    return x.made(local, Division(dim=x.division.dim, pieces=tuple(piece * times for piece in x.division.pieces)))


def split(x: Divided, sizes: int | Sequence[int], dim: int = 0) -> tuple[Divided, ...]:
    """Parts of `sizes` along `dim`, sizes of the whole."""
    dim = place_of(dim, plain(x).ndim)
    width = x.whole_shape()[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, width - start) for start in range(0, width, sizes)]
    if dim != x.division.dim:
        return tuple(moved(x, part, x.division.dim) for part in plain(x).split(list(sizes), dim))
    stops = list(accumulate(sizes))
    return tuple(_between(x, stop - size, stop, cuts=stops[:-1]) for size, stop in zip(sizes, stops, strict=True))


def chunk(x: Divided, count: int, dim: int = 0) -> tuple[Divided, ...]:
    width = x.whole_shape()[place_of(dim, plain(x).ndim)]
    return split(x, -(-width // count), dim)


def unbind(x: Divided, dim: int = 0) -> tuple[Divided, ...]:
    dim = place_of(dim, plain(x).ndim)
    count = x.whole_shape()[dim]
    if dim == x.division.dim:
        raise refuse(x, "a divided dim is taken apart", cuts=even_cuts(count))
    return tuple(index(x, (*[slice(None)] * dim, place)) for place in range(count))


def _between(x: Divided, start: int, stop: int, *, cuts: Sequence[int]) -> Divided:
    """The columns [start, stop) of the divided dim, which are whole pieces of it."""
    division, width = x.division, x.division.total
    edges = [0, *accumulate(division.pieces)]
    if start not in edges or stop not in edges:
        raise refuse(x, f"columns {start} to {stop} of {width}", cuts=tuple(Fraction(cut, width) for cut in cuts))
    pieces = division.pieces[edges.index(start) : edges.index(stop)]
    ranks = x.axis.size
    local = plain(x).narrow(division.dim, start // ranks, (stop - start) // ranks)
    return x.made(local, Division(dim=division.dim, pieces=pieces))


def index(x: Divided, key: Any) -> Divided:
    """x[key] where key cuts the divided dim at its pieces or leaves it alone."""
    keys = list(key) if isinstance(key, tuple) else [key]
    ndim = plain(x).ndim
    used = sum(1 for entry in keys if entry is not None and entry is not Ellipsis)
    if Ellipsis in [entry for entry in keys if not isinstance(entry, Tensor)]:
        place = next(i for i, entry in enumerate(keys) if entry is Ellipsis)
        keys[place : place + 1] = [slice(None)] * (ndim - used)
    keys += [slice(None)] * (ndim - sum(entry is not None for entry in keys))
    dim, result, tensors, where = 0, 0, 0, 0
    for place, entry in enumerate(keys):
        if entry is None:
            result += 1
            continue
        tensors += isinstance(entry, Tensor)
        if dim == x.division.dim:
            x, keys[place] = _sliced(x, entry), slice(None)
            where = result
        dim += 1
        result += 0 if isinstance(entry, int) else entry.ndim if isinstance(entry, Tensor) else 1
        if isinstance(entry, Tensor) and (entry.dtype is torch.bool or isinstance(entry, Divided) or tensors > 1):
            raise refuse(x, "an index that depends on data")
    return moved(x, plain(x)[tuple(keys)], where)


def _sliced(x: Divided, entry: Any) -> Divided:
    width = x.division.total
    if isinstance(entry, int):
        raise refuse(x, "one of a divided dim is taken", cuts=even_cuts(width))
    if not isinstance(entry, slice):
        raise refuse(x, "an index into a divided dim")
    start, stop, step = entry.indices(width)
    if step != 1:
        return _stepped(x, start, stop, step)
    if (start, stop) == (0, width):
        return x
    return _between(x, start, stop, cuts=[cut for cut in (start, stop) if 0 < cut < width])


def _stepped(x: Divided, start: int, stop: int, step: int) -> Divided:
    """Every `step`-th column, where each rank holds whole rounds of them."""
    division, share = x.division, x.division.total // x.axis.size
    if len(division.pieces) > 1 or share % step or start >= step or stop != division.total:
        raise refuse(x, "steps over a divided dim")
    local = plain(x)[(*[slice(None)] * division.dim, slice(start, None, step))]
    return x.made(local, Division(dim=division.dim, pieces=(division.total // step,)))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Divided:
    """Joined along another dim than the divided one."""
    held = [x for x in tensors if isinstance(x, Divided) or x.numel()]
    first = parts_among(held)[0]
    ndim = plain(first).ndim
    if place_of(dim, ndim) == first.division.dim:
        raise Indivisible("joined along a divided dim", origins=origins_of(held))
    back = first.division.dim - ndim
    local = torch.cat([beside(x, back, first.division, like=first) for x in held], dim=dim)
    return first.made(local, Division(dim=first.division.dim, pieces=first.division.pieces), origins=origins_of(held))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Divided:
    ndim = tensors[0].ndim + 1
    return cat([x.unsqueeze(place_of(dim, ndim)) for x in tensors], dim=dim)
