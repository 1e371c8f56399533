"""GPipe (1811.06965): every microbatch forward, then every microbatch backward."""

from __future__ import annotations

from meshwright.schedule.table import Action, Table, Work


def gpipe(*, pipeline: int, microbatches: int) -> Table:
    """Rank r holds stage r and every one of its `microbatches` activations at once."""
    return tuple(
        tuple(
            Action(work=work, stage=rank, microbatch=microbatch)
            for work in (Work.FORWARD, Work.BACKWARD)
            for microbatch in range(microbatches)
        )
        for rank in range(pipeline)
    )
