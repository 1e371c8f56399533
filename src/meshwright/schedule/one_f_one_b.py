"""One forward, one backward (PipeDream-flush, 2006.09503; 2104.04473): GPipe's time with at most p activations."""

from __future__ import annotations

from meshwright.schedule.table import Action, Table, Work


def one_f_one_b(*, pipeline: int, microbatches: int) -> Table:
    """Rank r holds stage r and at most min(p - r, m) activations: p - r - 1 forwards first, then pairs, then the rest.

    Any number of microbatches, fewer than ranks included.
    """
    return tuple(_row(rank, pipeline=pipeline, microbatches=microbatches) for rank in range(pipeline))


def _row(rank: int, *, pipeline: int, microbatches: int) -> tuple[Action, ...]:
    warm_up = min(pipeline - rank - 1, microbatches)
    row = [Action(work=Work.FORWARD, stage=rank, microbatch=index) for index in range(warm_up)]
    for index in range(microbatches):
        if warm_up + index < microbatches:
            row.append(Action(work=Work.FORWARD, stage=rank, microbatch=warm_up + index))
        row.append(Action(work=Work.BACKWARD, stage=rank, microbatch=index))
    return tuple(row)
