"""What ways of meeting and thin matrices cost in loss where it was measured: figures that no plan is ranked by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGap:
    """Loss in nats a token above that of ranks which meet whole in every step, after as many `tokens`.

    `word` is one of MEETINGS, met in rounds of `every` steps (0: in every step) by so many `ranks`, or that of matrices
    that have become thin, at the share `ratio` of their full rank; `parameters` are the model's, and `source` says who
    measured it or how to measure it again.
    """

    word: str
    nats: float
    parameters: float
    ranks: int
    every: int = 0
    tokens: float | None = None
    ratio: float | None = None
    source: str

    @property
    def words(self) -> str:
        """`eager +0.127 nats (5.4 M parameters, 2 ranks, every 11 steps, 154 K tokens; benchmarks/network/run.py)`."""
        return f"{self.word} {self.figure} ({self.where})"

    @property
    def figure(self) -> str:
        """`+0.127 nats`."""
        return f"{self.nats:+.3f} nats"

    @property
    def where(self) -> str:
        """`5.4 M parameters, 2 ranks, every 11 steps, 154 K tokens; benchmarks/network/run.py`."""
        said = [f"{format_count(self.parameters)} parameters", f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        said += [f"every {self.every} steps"] if self.every else []
        said += [f"{self.ratio:g} of the rank from a quarter of the run on"] if self.ratio else []
        said += [f"{format_count(self.tokens)} tokens"] if self.tokens else []
        return f"{', '.join(said)}; {self.source}"


_LAW = "2503.09799, table of scaling laws"
_OURS = "benchmarks/network/run.py, three seeds"
_FOUR_BITS = "benchmarks/network/losses.py in int4, three seeds"
_IN_PARTS = "benchmarks/network/run.py in int4, three seeds"
_ONE_SEED = "benchmarks/network/losses.py in int4, one seed"
_RANK_FOUR = "benchmarks/network/losses.py at rank 4, one seed"
_SMALL = "training loss of benchmarks/compression/run.py"

_THIN = "benchmarks/low_rank/network.py, three seeds"
_THICKER = "benchmarks/low_rank/network.py at a quarter, two seeds"
LOW_RANK = "low rank"

MEASURED: tuple[MeasuredGap, ...] = (
    MeasuredGap(word="diloco", nats=-0.004, parameters=4e9, ranks=2, every=30, source=_LAW),
    MeasuredGap(word="diloco", nats=-0.004, parameters=10e9, ranks=2, every=30, source=_LAW),
    MeasuredGap(word="streaming", nats=0.063, parameters=5.4e6, ranks=2, every=22, tokens=154e3, source=_OURS),
    MeasuredGap(word="streaming", nats=0.016, parameters=5.4e6, ranks=2, every=4, tokens=154e3, source=_FOUR_BITS),
    MeasuredGap(word="eager", nats=0.127, parameters=5.4e6, ranks=2, every=11, tokens=154e3, source=_OURS),
    MeasuredGap(word="diloco", nats=0.088, parameters=5.4e6, ranks=2, every=81, tokens=154e3, source=_OURS),
    MeasuredGap(word="eager", nats=0.016, parameters=5.4e6, ranks=2, every=4, tokens=307e3, source=_IN_PARTS),
    MeasuredGap(word="diloco", nats=0.116, parameters=5.4e6, ranks=2, every=8, tokens=154e3, source=_ONE_SEED),
    MeasuredGap(word="diloco", nats=0.104, parameters=5.4e6, ranks=2, every=25, tokens=154e3, source=_ONE_SEED),
    MeasuredGap(word="powersgd", nats=0.162, parameters=5.4e6, ranks=2, tokens=154e3, source=_RANK_FOUR),
    MeasuredGap(word="powersgd", nats=0.138, parameters=127e3, ranks=1, tokens=76.8e3, source=_SMALL),
    MeasuredGap(word="acpsgd", nats=0.182, parameters=127e3, ranks=1, tokens=76.8e3, source=_SMALL),
    MeasuredGap(word="topk", nats=0.221, parameters=127e3, ranks=1, tokens=76.8e3, source=_SMALL),
    MeasuredGap(word="demo", nats=0.363, parameters=127e3, ranks=1, tokens=76.8e3, source=_SMALL),
    MeasuredGap(word="one_bit", nats=0.934, parameters=127e3, ranks=1, tokens=76.8e3, source=_SMALL),
)

THIN: tuple[MeasuredGap, ...] = (
    MeasuredGap(word=LOW_RANK, nats=-0.001, parameters=5.4e6, ranks=2, tokens=154e3, ratio=0.1, source=_THIN),
    MeasuredGap(word=LOW_RANK, nats=0.018, parameters=5.4e6, ranks=2, tokens=154e3, ratio=0.25, source=_THICKER),
)


def low_rank_gap(ratio: float, *, parameters: float) -> MeasuredGap:
    """Of low rank training, the figure of the model nearest in size to `parameters`, and of those of one size that of
    the share of the rank nearest to `ratio`."""

    def distance(gap: MeasuredGap) -> tuple[float, float]:
        assert gap.ratio is not None
        return abs(math.log(gap.parameters / parameters)), abs(math.log(gap.ratio / ratio))

    return min(THIN, key=distance)


def nearest_gaps(ways: Mapping[str, int], *, parameters: float) -> tuple[MeasuredGap, ...]:
    """Of every way of meeting that was measured, the figure of the model nearest in size to `parameters`, and of those
    of one size that of the rounds nearest in length; `ways` are steps of a round by one of MEETINGS."""

    def distance(gap: MeasuredGap) -> tuple[float, float]:
        rounds = max(gap.every, 1) / max(ways[gap.word], 1)
        return abs(math.log(gap.parameters / parameters)), abs(math.log(rounds))

    known = {word: [gap for gap in MEASURED if gap.word == word] for word in ways}
    return tuple(min(gaps, key=distance) for gaps in known.values() if gaps)
