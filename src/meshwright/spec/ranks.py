"""Matrices of a layer as products of two thin ones: which can be, of which shape, and what that takes away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshwright.spec.codec import nearest
from meshwright.spec.errors import Problem
from meshwright.spec.part_tensors import ParameterTensor, part_tensors
from meshwright.spec.parts import Attention, FeedForward, LatentAttention, Mixer, Mixture, Transform

Parts = Mapping[str, Mixer | Transform]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MatrixRank:
    """A matrix W of m rows and n columns that is held as U V: `<name>.up.weight` (m, rank), `<name>.down.weight`
    (rank, n). `name` is that of the matrix in its layer without `.weight`: `mixer.query`, `transform.up`."""

    name: str
    rank: int

    def parameters(self, shape: tuple[int, ...]) -> int:
        """Of both factors of a matrix of `shape`."""
        return self.rank * sum(shape)


def factorable(parts: Parts) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices that may have a rank, by name: those of attention and of dense feed-forwards, shared
    experts included. Not routers, gates and indexers, whose matrices are thin, nor the stacks of experts."""
    return {tensor.name.removesuffix(".weight"): tensor.shape for tensor in _matrices(parts)}


def _matrices(parts: Parts) -> Iterator[ParameterTensor]:
    for place, part in parts.items():
        if isinstance(part, Attention | FeedForward):
            inside = part_tensors(place, part)
        elif isinstance(part, LatentAttention):
            inside = part_tensors(place, replace(part, indexer=None))
        elif isinstance(part, Mixture) and part.shared is not None:
            inside = part_tensors(f"{place}.shared", part.shared)
        else:
            continue
        yield from (tensor for tensor in inside if tensor.is_matrix)


def taken_away(ranks: tuple[MatrixRank, ...], parts: Parts) -> int:
    """Parameters that the matrices of `ranks` have more than their factors."""
    return _taken_away(ranks, tuple(parts.items()))


@cache
def _taken_away(ranks: tuple[MatrixRank, ...], parts: tuple[tuple[str, Mixer | Transform], ...]) -> int:
    shapes = factorable(dict(parts))
    return sum(shapes[each.name][0] * shapes[each.name][1] - each.parameters(shapes[each.name]) for each in ranks)


def factored(inside: Iterable[ParameterTensor], ranks: Sequence[MatrixRank]) -> Iterator[ParameterTensor]:
    """The parameters of a layer with two for each matrix that has a rank. Of the two the tensor axis divides the one
    that has the dim it divides of their product."""
    rank_of = {f"{each.name}.weight": each.rank for each in ranks}
    for tensor in inside:
        if (rank := rank_of.get(tensor.name)) is None:
            yield tensor
            continue
        names, shapes = factor_names(tensor.name), ((tensor.shape[0], rank), (rank, tensor.shape[1]))
        for dim, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            if tensor.divided == dim:
                yield ParameterTensor(name=name, shape=shape, divided=dim, runs=tensor.runs)
            else:
                yield ParameterTensor(name=name, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One factor of the matrix called `matrix`: its own dim `dim` is that one's, and its other dim the rank."""

    matrix: str
    dim: int


def factor_of(name: str, ranks: Sequence[MatrixRank]) -> Half | None:
    """Which factor parameter `name` is, as its block or the whole model calls it; None where it is none."""
    for each in ranks:
        for dim, half in enumerate(factor_names(f"{each.name}.weight")):
            if f".{name}".endswith(f".{half}"):
                return Half(matrix=name.removesuffix(half) + each.name, dim=dim)
    return None


def factor_names(name: str) -> tuple[str, str]:
    """Of the two factors of the matrix whose parameter is `name`: `mixer.query.up.weight` of `mixer.query.weight`."""
    matrix = name.removesuffix(".weight")
    return f"{matrix}.up.weight", f"{matrix}.down.weight"


def rank_problems(ranks: Sequence[MatrixRank], parts: Parts, where: str) -> Iterator[Problem]:
    """Ranks that no matrix of a layer of `parts` can have, by their paths under `where`."""
    if not ranks:
        return
    shapes, names = factorable(parts), [each.name for each in ranks]
    if names != sorted(set(names)):
        yield Problem(what="are not in the order of their names, each once", where=where, fix="sort them by name")
    for index, each in enumerate(ranks):
        shape = shapes.get(each.name)
        if shape is None:
            what = f"no matrix of this layer that can have a rank is called {each.name!r}"
            fix = nearest(each.name, shapes) if shapes else "leave it out"
            yield Problem(what=what, where=f"{where}[{index}].name", fix=fix)
        elif not 1 <= each.rank <= min(shape):
            what = f"{each.rank} is no rank of {each.name}, which is {shape[0]} x {shape[1]}"
            yield Problem(what=what, where=f"{where}[{index}].rank", fix=f"choose 1 to {min(shape)}")
