"""GPipe (1811.06965): every microbatch forward, then every microbatch backward. In slices of tokens it is TeraPipe
(2102.07988)."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, Ids
from meshwright.schedule.rows import run


def gpipe(rank: int, *, microbatches: int, slices: int) -> Ids:
    """Row `rank`: stage `rank`, and every one of its `microbatches` activations at once; the last slice of a
    microbatch goes backward first."""
    microbatch, part = np.divmod(np.arange(microbatches * slices), slices)
    forwards = run(FORWARD, rank, microbatch, part)
    return np.concatenate([forwards, run(BACKWARD, rank, microbatch, slices - 1 - part)])
