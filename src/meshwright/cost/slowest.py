"""The slowest of equal devices, for which all others wait."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from meshwright.cost.work import FloatArray

_DOUBLINGS = 31


def _deviations(count: float) -> float:
    """How many standard deviations above their mean the greatest of `count` normal figures is expected (Blom, 1958)."""
    return max(0.0, NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))


_LOGS = np.arange(_DOUBLINGS, dtype=np.float64)
_ABOVE = np.array([_deviations(2.0**log) for log in range(_DOUBLINGS)])


def slowest(spread: float, count: FloatArray) -> FloatArray:
    """How many times as long as the usual device the slowest of `count` needs for the same work; shape of `count`.

    `spread` is the standard deviation of that time among devices of a kind, as a share of it.
    """
    if spread == 0.0:
        return np.ones_like(count)
    known = count[:1] if (count == count[0]).all() else count
    return np.asarray(1.0 + spread * np.interp(np.log2(known), _LOGS, _ABOVE) + np.zeros_like(count))
