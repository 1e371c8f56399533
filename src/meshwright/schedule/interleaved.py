"""Interleaved 1F1B (2104.04473): v stages on each rank, a bubble v times smaller for v times the transfers."""

from __future__ import annotations

from meshwright.schedule.table import Action, Table, Work


def interleaved(*, pipeline: int, chunks: int, microbatches: int) -> Table:
    """Rank r holds stages r, r + p, ... and runs them in Megatron's order.

    Microbatches go p at a time through one chunk after the other; rank r starts with 2(p - r - 1) + (v - 1)p
    forwards. `microbatches` is a multiple of `pipeline`.
    """
    assert microbatches % pipeline == 0, "checked by build"
    return tuple(_row(rank, pipeline=pipeline, chunks=chunks, microbatches=microbatches) for rank in range(pipeline))


def _row(rank: int, *, pipeline: int, chunks: int, microbatches: int) -> tuple[Action, ...]:
    total = chunks * microbatches
    warm_up = min(2 * (pipeline - rank - 1) + (chunks - 1) * pipeline, total)

    def action(work: Work, index: int) -> Action:
        group, within = divmod(index, pipeline * chunks)
        chunk, member = divmod(within, pipeline)
        chunk = chunk if work is Work.FORWARD else chunks - 1 - chunk
        return Action(work=work, stage=chunk * pipeline + rank, microbatch=group * pipeline + member)

    row = [action(Work.FORWARD, index) for index in range(warm_up)]
    for index in range(total):
        if warm_up + index < total:
            row.append(action(Work.FORWARD, warm_up + index))
        row.append(action(Work.BACKWARD, index))
    return tuple(row)
