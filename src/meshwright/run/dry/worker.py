"""The process that counts: it has no other work, for its device, its process group and its tensors are all fake."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Sequence

from meshwright.run.dry.count import RankCount
from meshwright.spec import codec
from meshwright.spec.plan import Design

# What a process that counts imports: torch, and all of ours that lays a plan over a model.
PRELOADED = ("meshwright.run.dry.rank",)
GARBAGE = 10_000  # objects made between two searches for garbage


def count_ranks(design: str, ranks: Sequence[int], whole: bool) -> tuple[RankCount, ...]:
    """What pipeline ranks `ranks` of a design, written as JSON, do in one step. For a process of its own."""
    settle()
    from meshwright.run.dry.rank import Counter

    counter = Counter(design=codec.decode(Design, json.loads(design)), whole=whole)
    return tuple(counter.count(rank) for rank in ranks)


def settle() -> None:
    """This process does nothing but count from here on."""
    # A process group without peers warns of what it lacks.
    logging.disable(logging.WARNING)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch

    import meshwright.run.dry.rank  # noqa: F401  # what is not preloaded is imported now

    torch.set_num_threads(1)
    # What was imported is never looked at again when garbage or tensors are sought.
    gc.freeze()
    # Operators on fake tensors are short, and leave no garbage that has to be sought.
    gc.set_threshold(GARBAGE)
