"""What data parallel ranks send instead of whole gradients. What is left out of one step is sent with later ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.spec.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranked:
    """Factors of `rank` columns. Gradients are whole in steps before `start_step`."""

    kind: str
    rank: int = 4
    start_step: int = 0

    @property
    def words(self) -> str:
        return f"{self.kind} of rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSgd(_Ranked):
    """A matrix as the product of two factors, both summed in every step, one after the other (1905.13727)."""

    kind: str = "powersgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcpSgd(_Ranked):
    """As PowerSgd, but one factor in even steps and the other in odd ones, each with the one before it (2306.08881)."""

    kind: str = "acpsgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Of every bucket the `share` of its elements that are largest, with their places (1809.07599)."""

    kind: str = "topk"
    share: float = 0.01
    start_step: int = 0

    @property
    def words(self) -> str:
        return f"{self.kind} of {self.share:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeMo:
    """Of what is owed, which fades by `decay` a step, the `largest` cosine coefficients of every `chunk` elements, with
    their places (2411.19870): a momentum whose fast parts meet and whose slow ones stay."""

    kind: str = "demo"
    chunk: int = 64
    largest: int = 2
    decay: float = 0.999
    start_step: int = 0

    @property
    def words(self) -> str:
        return f"{self.kind} of {self.largest} in {self.chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit:
    """The sign of every element, and a scale for each rank's part of a bucket (1901.09847, 2102.02888)."""

    kind: str = "one_bit"
    start_step: int = 0

    @property
    def words(self) -> str:
        return self.kind


Compression = PowerSgd | AcpSgd | TopK | DeMo | OneBit
COMPRESSIONS: tuple[type[Compression], ...] = (PowerSgd, AcpSgd, TopK, DeMo, OneBit)
MOST_PLACES = 256  # of a chunk, whose places travel as a byte each


def compression_problems(compression: Compression, *, where: str) -> Iterator[Problem]:
    """Every number of it that is out of its range."""
    if compression.start_step < 0:
        what = f"{compression.start_step} is no step"
        yield Problem(where=f"{where}.start_step", what=what, fix="choose 0 or more")
    if isinstance(compression, PowerSgd | AcpSgd) and compression.rank < 1:
        what = f"factors of {compression.rank} columns"
        yield Problem(where=f"{where}.rank", what=what, fix="choose 1 or more")
    if isinstance(compression, TopK) and not 0.0 < compression.share <= 1.0:
        what = f"a share of {compression.share} of a gradient"
        yield Problem(where=f"{where}.share", what=what, fix="choose above 0, to 1")
    if isinstance(compression, DeMo):
        yield from _demo_problems(compression, where=where)


def _demo_problems(compression: DeMo, *, where: str) -> Iterator[Problem]:
    if not 2 <= compression.chunk <= MOST_PLACES:
        what = f"chunks of {compression.chunk} elements"
        yield Problem(where=f"{where}.chunk", what=what, fix=f"choose 2 to {MOST_PLACES}: places are a byte each")
    elif not 1 <= compression.largest <= compression.chunk:
        what = f"{compression.largest} of the {compression.chunk} coefficients of a chunk"
        yield Problem(where=f"{where}.largest", what=what, fix=f"choose 1 to {compression.chunk}")
    if not 0.0 < compression.decay <= 1.0:
        what = f"a decay of {compression.decay}"
        yield Problem(where=f"{where}.decay", what=what, fix="choose above 0, to 1, which keeps all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """`count` matrices of `rows` by `columns` as products of factors of `rank` columns."""

    count: int
    rows: int
    columns: int
    rank: int

    @property
    def size(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def left(self) -> int:
        """Elements of the factors of `rows` rows."""
        return self.count * self.rows * self.rank

    @property
    def right(self) -> int:
        """Elements of those of `columns` rows."""
        return self.count * self.columns * self.rank


def factors(shape: Sequence[int], *, rank: int) -> Factors | None:
    """The last two dims of a tensor of `shape` as matrices; None where both factors together are no smaller, and for a
    vector: such a tensor travels whole."""
    if len(shape) < 2:
        return None
    rows, columns = shape[-2:]
    if rank * (rows + columns) >= rows * columns:
        return None
    return Factors(count=math.prod(shape[:-2]), rows=rows, columns=columns, rank=rank)


def kept(elements: int, *, share: float) -> int:
    """How many of `elements` are sent: one at the least."""
    return min(elements, max(1, math.ceil(share * elements)))


def usual_step(compression: Compression | None) -> int:
    """A step whose bytes stand for all that are compressed: an even one."""
    start = 0 if compression is None else max(compression.start_step, 0)
    return 2 + start + start % 2
