"""Which matrices may become two thin ones, and whether that pays: a step before and after, as both are predicted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.cost.predict import predict
from meshwright.cost.traffic import traffic
from meshwright.spec.blocks import Layer
from meshwright.spec.low_rank import RANK_MULTIPLE, LowRank, Ranks, ranks_of
from meshwright.spec.model import MatrixRank
from meshwright.spec.plan import Design
from meshwright.spec.ranks import factorable
from meshwright.spec.units import format_bytes, format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A matrix (rows, columns) that may become two factors: `name` in block `block`, as `mixer.query`."""

    block: int
    name: str
    rows: int
    columns: int

    @property
    def full_rank(self) -> int:
        return min(self.rows, self.columns)

    @property
    def most(self) -> int:
        """The largest multiple of RANK_MULTIPLE whose factors have fewer parameters than the matrix."""
        even = (self.rows * self.columns - 1) // (self.rows + self.columns)
        return even // RANK_MULTIPLE * RANK_MULTIPLE

    @property
    def kind(self) -> tuple[str, int, int]:
        """What it has in common with those of other layers."""
        return self.name, self.rows, self.columns

    @property
    def key(self) -> str:
        """The name in the whole model."""
        return f"layers.{self.block - 1}.{self.name}"


def candidates(design: Design, spec: LowRank) -> tuple[Candidate, ...]:
    """Matrices of layers that are trained, past the first `dense_layers`, large enough, whose factors are smaller."""
    found = []
    for block, layer in enumerate(design.model.blocks):
        if not isinstance(layer, Layer) or block <= spec.dense_layers or block in design.plan.frozen_blocks:
            continue
        for name, (rows, columns) in factorable(layer.places).items():
            one = Candidate(block=block, name=name, rows=rows, columns=columns)
            if one.full_rank >= spec.least_dim and one.most >= RANK_MULTIPLE:
                found.append(one)
    return tuple(found)


def rounded(one: Candidate, wanted: float) -> int:
    """The rank that is meant by `wanted`: a multiple of RANK_MULTIPLE, at most the one that still saves parameters."""
    return min(one.most, max(RANK_MULTIPLE, math.ceil(wanted / RANK_MULTIPLE) * RANK_MULTIPLE))


def given_ranks(found: Iterable[Candidate], *, ratio: float) -> Ranks:
    """Every matrix with `ratio` of its full rank."""
    return grouped((one, rounded(one, ratio * one.full_rank)) for one in found)


def grouped(chosen: Iterable[tuple[Candidate, int]]) -> Ranks:
    """As a model takes them: by block, sorted by name."""
    found: dict[int, list[MatrixRank]] = {}
    for one, rank in chosen:
        found.setdefault(one.block, []).append(MatrixRank(name=one.name, rank=rank))
    return {block: tuple(sorted(ranks)) for block, ranks in sorted(found.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A step of one design: how long it takes, and the tensors of all collectives of its busiest pipeline rank."""

    seconds: float
    collective_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The factored design that is fastest, beside the dense one; `whole` are kinds of matrices it leaves as they are.

    It pays where its step is shorter by the share `gain`.
    """

    design: Design
    dense: Price
    factored: Price
    whole: tuple[str, ...]
    gain: float

    @property
    def saved(self) -> float:
        """The share of the dense step that is saved."""
        return 1.0 - self.factored.seconds / self.dense.seconds

    @property
    def pays(self) -> bool:
        return bool(ranks_of(self.design.model)) and self.saved >= self.gain

    @property
    def words(self) -> str:
        """`a step of 1.2 s with 19 MiB in collectives is predicted to take 0.7 s with 9 MiB, 42 % less (...)`."""
        before, after = (
            f"{format_seconds(each.seconds)} with {format_bytes(each.collective_bytes)} in collectives"
            for each in (self.dense, self.factored)
        )
        share = f"{format_percent(abs(self.saved))} {'less' if self.saved >= 0 else 'more'}"
        words = f"a step of {before} is predicted to take {after}, {share} ({format_percent(self.gain)} less is asked)"
        return words + (f"; {', '.join(self.whole)} would not pay and stay whole" if self.whole and self.pays else "")


def verdict(design: Design, found: Sequence[Candidate], ranks: Ranks, *, gain: float) -> Verdict:
    """What factoring the matrices `found` into `ranks` would bring the dense `design`.

    Like matrices of all layers are factored together or not at all: a kind stays whole where the step is no slower for
    it, asked of the costliest to leave whole last.
    """
    chosen = [one for one in found if _rank(ranks, one) is not None]
    kinds = sorted({one.kind for one in chosen}, key=lambda kind: _saved(chosen, ranks, kind))
    dense, left = price(design), list[str]()
    best = _factored(design, chosen, ranks)
    paid = price(best)
    for kind in kinds:
        others = [one for one in chosen if one.kind != kind]
        other = _factored(design, others, ranks)
        if (less := price(other)).seconds <= paid.seconds:
            chosen, best, paid = others, other, less
            left.append(kind[0])
    return Verdict(design=best, dense=dense, factored=paid, whole=tuple(sorted(set(left))), gain=gain)


def price(design: Design) -> Price:
    """A step of `design` as the cost model predicts it. Raises ConfigError as `predict` does."""
    ranks = {stage.rank for stage in design.plan.stages}
    sent = max(sum(traffic(design, rank=rank).bytes.values()) for rank in ranks)
    return Price(seconds=predict(design).step_seconds, collective_bytes=sent)


def _factored(design: Design, chosen: Collection[Candidate], ranks: Ranks) -> Design:
    pairs = [(one, rank) for one in chosen if (rank := _rank(ranks, one)) is not None]
    return replace(design, model=design.model.with_ranks(grouped(pairs)))


def _rank(ranks: Ranks, one: Candidate) -> int | None:
    return next((each.rank for each in ranks.get(one.block, ()) if each.name == one.name), None)


def _saved(chosen: Sequence[Candidate], ranks: Ranks, kind: tuple[str, int, int]) -> int:
    """Parameters that factoring the matrices of `kind` saves."""
    alike = [one for one in chosen if one.kind == kind]
    return sum(one.rows * one.columns - (_rank(ranks, one) or 0) * (one.rows + one.columns) for one in alike)
