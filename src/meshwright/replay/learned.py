"""What a few measured runs tell of the others on the same machines: errors by cause, and of runs that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.replay.scores import Point

Floats = npt.NDArray[np.float64]
COUNT = 10  # runs that are measured
_ALIKE = 0.5  # of a cause's variance is shared by runs that are alike alone, the rest by all
_DOUBLINGS = 1.0  # of any size over which runs stop being alike
_NOISE = 0.03  # standard deviation of the logarithm of one measured step
_SIZES = ("tp", "pp", "dp", "cp", "ep", "mbs", "hidden", "seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """`measured` are lines of the runs to measure; `error` is log(measured / predicted) as they tell it, by line."""

    measured: frozenset[int]
    error: dict[int, float]


def learned(points: Sequence[Point]) -> Learned | None:
    """What COUNT runs of `points`, timed runs of one source, tell of all of them; None where no more were timed.

    Errors are a Gaussian process: each cause of the prediction's interval adds one of its own standard deviation, half
    of it common to all runs and half to runs of like sizes. Which runs are measured is designed, one after the other:
    each is the one that leaves least variance over all groups (Cohn 1996, 10.1016/0893-6080(95)00137-9), for which no
    measured time is looked at.
    """
    if len(points) <= COUNT:
        return None
    covariance, weight = _covariance(points), _weights(points)
    chosen: list[int] = []
    left = covariance.copy()
    for _ in range(COUNT):
        gain = weight @ np.square(left) / (np.diag(left) + _NOISE**2)
        gain[chosen] = -np.inf
        best = int(np.argmax(gain))
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + _NOISE**2)
    seen = np.array([-(points[index].error or 0.0) for index in chosen])
    known = covariance[np.ix_(chosen, chosen)] + _NOISE**2 * np.eye(COUNT)
    told = covariance[:, chosen] @ np.linalg.solve(known, seen)
    lines = [point.run.line for point in points]
    return Learned(
        measured=frozenset(lines[index] for index in chosen),
        error={line: float(error) for line, error in zip(lines, told, strict=True)},
    )


def _covariance(points: Sequence[Point]) -> Floats:
    """Of log(measured / predicted) between all pairs of runs."""
    names = sorted({name for point in points for name in point.doubts})
    doubts = np.array([[point.doubts.get(name, 0.0) for name in names] for point in points])
    sizes = np.log2([[point.run.number(name) or 1.0 for name in _SIZES] for point in points])
    apart = np.square(sizes[:, None] - sizes[None]).sum(axis=-1)
    alike = np.exp(-0.5 * apart / _DOUBLINGS**2)
    return np.asarray(doubts @ doubts.T * (1.0 - _ALIKE + _ALIKE * alike))


def _weights(points: Sequence[Point]) -> Floats:
    """Groups weigh alike, as in scores."""
    groups = [point.run.group for point in points]
    return np.array([1.0 / groups.count(group) for group in groups])
