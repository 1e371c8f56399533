"""Seq1F1B (2406.03488): 1F1B of runs of a microbatch's tokens, a bubble k times smaller and fewer activations."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, Ids
from meshwright.schedule.rows import one_for_one, run


def sequence(rank: int, *, pipeline: int, microbatches: int, slices: int) -> Ids:
    """Row `rank`: stage `rank`; p - rank + k - 2 slices forward first, so that a microbatch's last slice, which goes
    backward first, is there in time.
    """
    microbatch, part = np.divmod(np.arange(microbatches * slices), slices)
    forwards = run(FORWARD, rank, microbatch, part)
    backwards = run(BACKWARD, rank, microbatch, slices - 1 - part)
    return one_for_one(forwards, backwards, warm_up=pipeline - rank - 2 + slices)
