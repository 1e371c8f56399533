"""All that is told beside why the best plan is best: what the job does not ask for, and would change it."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.search.advice import advise, advise_masks, advise_otherwise, advise_trainer
from meshwright.search.low_rank import advise_low_rank, foresee_low_rank
from meshwright.search.parts import Search, advise_parts
from meshwright.search.quorum import advise_quorum
from meshwright.search.refine import Entry
from meshwright.search.trainer import Trainer
from meshwright.spec.job import JobSpec


def counsel(refined: Sequence[Entry], asked: JobSpec, *, trainer: Trainer | None, best: Search) -> tuple[str, ...]:
    """What the job does not ask for, and would change the first of `refined` or what that takes; `best` searches."""
    chosen, report = refined[0]
    meeting = advise(chosen, report)
    parts = () if trainer else advise_parts(chosen, report, best=best, learners=not meeting)
    return (
        *parts,
        *advise_trainer(asked, trainer),
        *meeting,
        *advise_masks(refined),
        *advise_otherwise(chosen, report),
        *advise_quorum(chosen, report),
        *foresee_low_rank(chosen),
        *advise_low_rank(chosen, report),
    )
