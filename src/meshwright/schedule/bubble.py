"""The papers' bubbles: how idle a schedule leaves its ranks when stages are equal and transfers free."""

from __future__ import annotations

from meshwright.schedule.build import SPLIT, problems
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import ScheduleKind as Kind


def bubble_fraction(kind: Kind, *, pipeline: int, chunks: int, microbatches: int, slices: int = 1) -> float:
    """Idle share of a step of equal stages without transfers, a backward twice as long as a forward, its halves equal.

    From the first forward to the last backward with p ranks, v chunks, m microbatches of k slices:
    1f1b (p - 1) / (m + p - 1); interleaved (2104.04473) and breadth-first (2211.05953, m >= p) (p - 1) / (v m + p - 1);
    gpipe (2102.07988) and seq1f1b (2406.03488) (p - 1) / (k m + p - 1); zero bubble with enough microbatches
    (p - 1) / (3 v m + p - 1), the way of the first microbatch to the last rank, which no schedule of theirs avoids.
    2401.10241 calls H2 and V free of bubbles because no rank idles between its own first and last action: that is
    worth time only where optimizer steps need not wait for each other. Raises ConfigError as `build` does.
    """
    found = problems(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices)
    if found:
        raise ConfigError(found)
    behind = pipeline - 1
    work, idle = slices * chunks * microbatches, behind
    if kind is Kind.BREADTH_FIRST:
        idle += (chunks - 1) * max(pipeline - microbatches, 0)
    if kind in SPLIT:
        work *= 3
    if kind is Kind.ZERO_BUBBLE_H1:
        idle = max(behind, 2 * behind - (microbatches - 1))
    if kind is Kind.ZERO_BUBBLE_H2:
        idle = max(behind, 2 * behind - microbatches // 2)
    if kind is Kind.ZERO_BUBBLE_V:
        idle = max(behind, 4 * behind - 2 * (microbatches - 1))
    return idle / (work + idle)
