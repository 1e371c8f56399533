"""Divided: a tensor of which each rank of an axis holds a part, and which shows the shape of the whole.

A user's forward is written for whole tensors. What it makes of divided ones is worked out function by function (see
divided_functions.py): the sizes that it names are those of the whole, the kernels see this rank's part, and where the
ranks have to meet (1909.08053) they do. What no rule covers raises Indivisible, so that nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.collectives import EnterReplicated, GatherColumns, LeaveReplicated
from meshwright.parallel.torch_compat import plain
from meshwright.spec.errors import ConfigError, Problem

WHOLE: frozenset[str] = frozenset()


class Indivisible(ConfigError):
    """A function cannot work on a part. `origins` are the parameters that divided it; cut at `cuts`, fractions of their
    columns, and the parts dealt from every piece, it could.

    Where a forward raises it, the example that the layout was found from did not show what it does.
    """

    def __init__(self, reason: str, *, origins: frozenset[str] = WHOLE, cuts: tuple[Fraction, ...] = ()) -> None:
        fix = "let parallelize's example run the forward that does it, or use tensor 1"
        super().__init__(Problem(what=reason, where=", ".join(sorted(origins)), fix=fix))
        self.reason, self.origins, self.cuts = reason, origins, cuts


class Unlike(Indivisible):
    """Tensors that are divided in two ways meet: one of them may stay divided."""


class Use(StrEnum):
    """Features stay divided until a product sums them; rows of a vocabulary meet at once: embeddings are summed and
    logits gathered."""

    FEATURES = "features"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """`dim` is divided: of each of its `pieces` (sizes of the whole, in order) a rank holds one even run."""

    dim: int
    pieces: tuple[int, ...]
    use: Use = Use.FEATURES

    @property
    def total(self) -> int:
        return sum(self.pieces)

    def shared(self, ranks: int) -> bool:
        """Whether every piece divides evenly."""
        return all(piece % ranks == 0 for piece in self.pieces)


class Axis(Protocol):
    """The ranks that share a division: this rank's place, and how they meet."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def enter(self, x: Tensor) -> Tensor:
        """x, that all ranks hold, about to meet parts: gradients of its uses are summed over the ranks."""

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' partial x."""

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' x one after another along the last dim, for all of them to use alike."""

    def drawing_apart(self, device: torch.device) -> AbstractContextManager[None]:
        """While entered each rank draws random numbers of its own; before and after all of them draw alike."""

    def forget(self) -> None:
        """Nothing of a forward is held."""


class GroupAxis:
    """The tensor axis of this rank. Uses of one tensor in a row share its entrance, and one sum of gradients."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._entered: tuple[Tensor, int, Tensor] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def enter(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._entered is not None and self._entered[0] is x and self._entered[1] == x._version:
            return self._entered[2]
        entered: Tensor = EnterReplicated.apply(x, self.group)
        self._entered = (x, x._version, entered)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        result: Tensor = LeaveReplicated.apply(x, self.group)
        return result

    def gather(self, x: Tensor) -> Tensor:
        result: Tensor = GatherColumns.apply(x, self.group)
        return result

    @contextmanager
    def drawing_apart(self, device: torch.device) -> Iterator[None]:
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed)
            yield

    def forget(self) -> None:
        self._entered = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImaginedAxis:
    """An axis of `size` ranks seen from the first, on tensors without memory: shapes are as they would be."""

    size: int
    rank: int = 0

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def drawing_apart(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self) -> None:
        """Nothing is held."""


class Deciding(Tensor):
    """A tensor whose own rules come before those of divided ones."""


class Divided(Tensor):
    """What this rank holds; `division`, `axis` and the `origins` of the division (names of parameters) beside it."""

    division: Division
    axis: Axis
    origins: frozenset[str]

    def made(self, local: Tensor, division: Division, *, origins: frozenset[str] | None = None) -> Divided:
        """`local` as a tensor of this kind, on the same axis."""
        return divided(
            local, division, kind=type(self), axis=self.axis, origins=self.origins if origins is None else origins
        )

    def whole_shape(self) -> torch.Size:
        """The shape of all ranks' parts together."""
        shape = list(plain(self).shape)
        shape[self.division.dim] = self.division.total
        return torch.Size(shape)


def divided(
    local: Tensor, division: Division, *, kind: type[Divided], axis: Axis, origins: frozenset[str] = WHOLE
) -> Divided:
    """`local` as this rank's part of a tensor that `division` divides over `axis`."""
    part = local.as_subclass(kind)
    part.division, part.axis, part.origins = division, axis, origins
    return part


def own(whole: Tensor, division: Division, axis: Axis) -> Tensor:
    """This rank's part of `whole`: a view where there is one piece."""
    runs, start = [], 0
    for piece in division.pieces:
        share = piece // axis.size
        runs.append(whole.narrow(division.dim, start + axis.rank * share, share))
        start += piece
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=division.dim)


def order(division: Division, *, ranks: int) -> list[int]:
    """Places of the whole along the divided dim, rank after rank."""
    found: list[int] = []
    for rank in range(ranks):
        start = 0
        for piece in division.pieces:
            share = piece // ranks
            found += range(start + rank * share, start + (rank + 1) * share)
            start += piece
    return found


def parts_among(tensors: Sequence[Any]) -> list[Divided]:
    return [x for x in tensors if isinstance(x, Divided)]


def origins_of(tensors: Sequence[Any]) -> frozenset[str]:
    return WHOLE.union(*(x.origins for x in parts_among(tensors)))


def beside(x: Any, back: int, division: Division, *, like: Divided) -> Any:
    """x as it meets parts divided at the dim `back` (counted from the end, -1 the last): its own part where it is
    divided or as wide as the whole there, itself where it broadcasts."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, Divided):
        if x.division.dim - plain(x).ndim != back or x.division.pieces != division.pieces:
            raise Unlike("tensors divided in two ways meet", origins=x.origins | like.origins)
        return plain(x)
    if x.ndim < -back or x.shape[back] == 1:
        return like.axis.enter(x)
    if x.shape[back] != division.total:
        raise Indivisible(f"{x.shape[back]} meet {division.total}", origins=like.origins)
    there = Division(dim=x.ndim + back, pieces=division.pieces)
    return own(like.axis.enter(x), there, like.axis)
