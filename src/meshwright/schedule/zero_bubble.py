"""Zero bubble H1 and H2 (2401.10241): 1F1B with the backward in two halves, the later of which fill the bubble."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import FORWARD, INPUT, Ids
from meshwright.schedule.rows import one_for_one, run, with_weights


def zero_bubble(rank: int, *, pipeline: int, microbatches: int, depth: int) -> Ids:
    """Row `rank` of H1 (`depth` 1) or H2 (2): depth (p - rank - 1) forwards first, depth rank weight halves last.

    Every rank holds at most depth (p - 1) + 1 activations: as many as 1F1B's first rank, or nearly twice that.
    """
    every = np.arange(microbatches)
    warm_up = depth * (pipeline - rank - 1)
    row = one_for_one(run(FORWARD, rank, every), run(INPUT, rank, every), warm_up=warm_up)
    return with_weights(row, lag=depth * rank)
