"""Equal devices are not equally fast: ranks that wait for each other go as the slowest of them.

Chips that a power limit holds back run at clocks of their own (2208.11035). The ranks of a pipeline stage wait for each
other in every layer or at the end of every step; stages are seldom equally heavy, and the heaviest hides slow chips of
the others. Of n that take normal times about their mean the longest is expected at the quantile (n - 3/8) / (n + 1/4)
(Blom, 1958).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from meshwright.cost.work import FloatArray


def slowest_share(devices: FloatArray, *, spread: float) -> FloatArray:
    """The share of the usual rate that is left to `devices` whose times deviate by `spread`; shape (rows,)."""
    if spread == 0.0:
        return np.ones_like(devices)
    known, inverse = np.unique(devices, return_inverse=True)
    behind = np.array([_deviations(float(count)) for count in known])
    return np.asarray(1.0 / (1.0 + spread * behind), dtype=np.float64)[inverse.reshape(-1)]


@cache
def _deviations(devices: float) -> float:
    """How many standard deviations the last of so many is behind the mean."""
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25)) if devices > 1.0 else 0.0
