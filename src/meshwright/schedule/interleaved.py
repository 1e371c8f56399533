"""Interleaved 1F1B (2104.04473): v stages on each rank, a bubble v times smaller for v times the transfers."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, Ids
from meshwright.schedule.rows import one_for_one, run


def interleaved(rank: int, *, pipeline: int, chunks: int, microbatches: int) -> Ids:
    """Row `rank`: stages rank, rank + p, ... in Megatron's order.

    Microbatches go p at a time through one chunk after the other; rank r starts with 2(p - r - 1) + (v - 1)p
    forwards. `microbatches` is a multiple of `pipeline`.
    """
    assert microbatches % pipeline == 0, "checked by build"
    group, within = np.divmod(np.arange(chunks * microbatches), pipeline * chunks)
    chunk, member = np.divmod(within, pipeline)
    microbatch = group * pipeline + member
    forwards = run(FORWARD, chunk * pipeline + rank, microbatch)
    backwards = run(BACKWARD, (chunks - 1 - chunk) * pipeline + rank, microbatch)
    return one_for_one(forwards, backwards, warm_up=2 * (pipeline - rank - 1) + (chunks - 1) * pipeline)
