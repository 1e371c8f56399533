"""Breadth-first (2211.05953): every microbatch through one stage of the rank before the next; GPipe in loops.

Parameters of a stage are gathered and its gradients reduced once a pass. On one rank it is layered accumulation
(2106.02679).
"""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, Ids
from meshwright.schedule.rows import run


def breadth_first(rank: int, *, pipeline: int, chunks: int, microbatches: int) -> Ids:
    """Row `rank`: stages rank, rank + p, ... forward, then in reverse backward, with all activations at once."""
    chunk, microbatch = np.divmod(np.arange(chunks * microbatches), microbatches)
    forwards = run(FORWARD, chunk * pipeline + rank, microbatch)
    return np.concatenate([forwards, run(BACKWARD, (chunks - 1 - chunk) * pipeline + rank, microbatch)])
