"""Zero bubble V (2405.15362): two stages a rank, down the ranks and up again, with 1F1B's memory on every rank."""

from __future__ import annotations

from meshwright.schedule.program import Ids
from meshwright.schedule.rows import counted


def zero_bubble_v(rank: int, *, pipeline: int, microbatches: int) -> Ids:
    """Row `rank`: stages rank and 2p - 1 - rank.

    Fewer than 2p - 1 microbatches go as the first ones of so many.
    """
    full = max(2 * pipeline - 1, microbatches)
    after = pipeline - rank
    steps = [
        ("F0", 2 * after - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", after),
        ("F0 I0 W0 F1 I1 W1", full - 2 * pipeline + 1 + rank),
        ("I0 W0 F1 I1 W1", after - 1),
        ("I0 I1", rank),
        ("I0 W0", after),
        ("W1", rank),
        ("W0", rank),
    ]
    return counted(steps, stages=(rank, 2 * pipeline - 1 - rank), microbatches=microbatches)
