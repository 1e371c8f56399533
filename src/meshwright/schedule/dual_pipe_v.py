"""DualPipeV (DeepSeek's cut of 2412.19437's DualPipe in half): a forward and a backward of unlike stages in pairs."""

from __future__ import annotations

from meshwright.schedule.program import Ids
from meshwright.schedule.rows import counted


def dual_pipe_v(rank: int, *, pipeline: int, microbatches: int) -> Ids:
    """Row `rank`: stages rank and 2p - 1 - rank; at least 2p microbatches.

    The pairs that the original overlaps, exchanges of experts behind arithmetic, are two actions in turn here.
    """
    assert microbatches >= 2 * pipeline, "checked by build"
    after, half = pipeline - rank - 1, (rank + 1) // 2
    steps = [
        ("F0", 2 * after),
        ("F0 F1", rank + 1),
        ("I1 W F1", after),
        ("F0 B1 F1 B0", microbatches - 2 * pipeline + rank + 1),
        ("B1 F1 B0", after),
        ("B1 B0", half),
        ("B1 I0", 1 - rank % 2),
        ("I1 I0", rank + 1 - half - (1 - rank % 2)),
        ("W I0", after),
        ("W", rank + 1),
    ]
    return counted(steps, stages=(rank, 2 * pipeline - 1 - rank), microbatches=microbatches)
