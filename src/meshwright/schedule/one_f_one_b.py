"""One forward, one backward (PipeDream-flush, 2006.09503; 2104.04473): GPipe's time with at most p activations."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, Ids
from meshwright.schedule.rows import one_for_one, run


def one_f_one_b(rank: int, *, pipeline: int, microbatches: int) -> Ids:
    """Row `rank`: stage `rank` and at most min(p - rank, m) activations: p - rank - 1 forwards, pairs, the rest.

    Any number of microbatches, fewer than ranks included.
    """
    every = np.arange(microbatches)
    return one_for_one(run(FORWARD, rank, every), run(BACKWARD, rank, every), warm_up=pipeline - rank - 1)
