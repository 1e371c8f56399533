"""The process that counts: it has no other work, for its device, its process group and its tensors are all fake."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from meshwright.run.dry.count import RankCount
from meshwright.run.dry.events import Packed
from meshwright.run.dry.jobs import Job
from meshwright.run.dry.pace import Pace
from meshwright.spec import codec
from meshwright.spec.plan import Design

# What a process that counts imports: torch, and all of ours that lays a plan over a model.
PRELOADED = ("meshwright.run.dry.rank",)
GARBAGE = 10_000  # objects made between two searches for garbage


def trace_jobs(design: str, jobs: Sequence[Job], say: Callable[[str], None]) -> dict[str, Packed]:
    """What each of `jobs` of a design, written as JSON, does, packed, by its key; `say` is told how far it has come.
    For a process of its own."""
    settle()
    from meshwright.run.dry.rank import Counter

    counter = Counter(design=_read(design), pace=Pace(say))
    return {job.key: counter.trace(job) for job in jobs}


def count_ranks(
    design: str, ranks: Sequence[int], whole: bool, known: Mapping[str, Packed], say: Callable[[str], None]
) -> tuple[RankCount, ...]:
    """What pipeline ranks `ranks` of a design, written as JSON, do in one step; what jobs do that are `known` is not
    traced again, and `say` is told how far it has come. For a process of its own."""
    settle()
    from meshwright.run.dry.rank import Counter

    counter = Counter(design=_read(design), whole=whole, known=known, pace=Pace(say))
    return tuple(counter.count(rank) for rank in ranks)


def _read(design: str) -> Design:
    return codec.decode(Design, json.loads(design))


def hush() -> None:
    """Torch that is imported from here on, in this process and those it starts, tells errors alone, if nothing else is
    asked for: of what a process group without peers lacks it warns whenever one is made."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def settle() -> None:
    """This process does nothing but count from here on."""
    # A process group without peers warns of what it lacks.
    logging.disable(logging.WARNING)
    import torch

    import meshwright.run.dry.rank  # noqa: F401  # what is not preloaded is imported now

    torch.set_num_threads(1)
    # What was imported is never looked at again when garbage or tensors are sought.
    gc.freeze()
    # Operators on fake tensors are short, and leave no garbage that has to be sought.
    gc.set_threshold(GARBAGE)
