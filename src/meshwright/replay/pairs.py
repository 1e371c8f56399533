"""Pairs of runs in order: how many a prediction has right, and how many any prediction made from plans could have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

TIE = 1e-12  # rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Seconds a token of one run, measured and predicted, and the noise of the measurement, a share."""

    pace: float
    predicted: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Shares of the pairs that differ by more than the noise.

    `right` are in the order predicted, ties half. `most` could be: runs whose predictions tie are of one plan, of which
    no prediction tells which is faster, and two plans have one order, whichever of their runs are compared.
    """

    right: float
    most: float


def order(runs: Sequence[Told]) -> Order | None:
    """None where no pair differs by more than the noise."""
    plan = _plans(runs)
    right, ties = 0.0, 0
    faster: dict[tuple[int, int], Counter[bool]] = {}
    for (one, first), (other, second) in combinations(zip(runs, plan, strict=True), 2):
        measured = math.log(one.pace / other.pace)
        if abs(measured) <= math.log1p(max(one.noise, other.noise)):
            continue
        if first == second:
            ties += 1
            continue
        right += float((measured > 0.0) == (one.predicted > other.predicted))
        between = (min(first, second), max(first, second))
        faster.setdefault(between, Counter())[(measured > 0.0) == (first < second)] += 1
    count = ties + sum(each.total() for each in faster.values())
    if not count:
        return None
    most = sum(max(each.values()) for each in faster.values())
    return Order(right=(right + 0.5 * ties) / count, most=(most + 0.5 * ties) / count)


def _plans(runs: Sequence[Told]) -> list[int]:
    """A number for each run, the same for those whose predictions tie."""
    plans, found = [0] * len(runs), 0
    ranked = sorted(range(len(runs)), key=lambda place: runs[place].predicted)
    for before, place in zip([None, *ranked], ranked, strict=False):
        if before is not None and runs[place].predicted > runs[before].predicted * (1.0 + TIE):
            found += 1
        plans[place] = found
    return plans
