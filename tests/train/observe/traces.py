"""Made-up seconds of ranks in steps: noise, stutters and stretches, with and without a fault."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def own_seconds(
    ranks: int,
    steps: int,
    *,
    seed: int,
    usual: float = 0.05,
    noise: float = 0.06,
    common: float = 0.1,
    stutters: float = 0.02,
    wander: float = 0.02,
) -> FloatArray:
    """(steps, ranks): a scatter of `noise`, what moves all ranks together, steps that take two to six times as long,
    and a slow wandering of each rank by itself."""
    draw = np.random.default_rng(seed)
    logs = noise * draw.standard_normal((steps, ranks)) + common * draw.standard_normal((steps, 1))
    drift = np.zeros(ranks)
    for step in range(steps):
        drift = 0.98 * drift + wander * np.sqrt(1 - 0.98**2) * draw.standard_normal(ranks)
        logs[step] += drift
    stutter = draw.random((steps, ranks)) < stutters
    return usual * np.exp(logs) * np.where(stutter, draw.uniform(2.0, 6.0, (steps, ranks)), 1.0)
