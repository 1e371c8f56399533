"""GPipe (1811.06965): every microbatch forward, then every microbatch backward."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, Ids
from meshwright.schedule.rows import run


def gpipe(rank: int, *, microbatches: int) -> Ids:
    """Row `rank`: stage `rank`, and every one of its `microbatches` activations at once."""
    every = np.arange(microbatches)
    return np.concatenate([run(FORWARD, rank, every), run(BACKWARD, rank, every)])
