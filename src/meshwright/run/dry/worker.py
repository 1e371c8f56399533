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


def count_ranks(design: str, ranks: Sequence[int], whole: bool) -> tuple[RankCount, ...]:
    """What pipeline ranks `ranks` of a design, written as JSON, do in one step. For a process of its own."""
    # A process group without peers warns of what it lacks.
    logging.disable(logging.WARNING)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch

    from meshwright.run.dry.rank import Counter

    torch.set_num_threads(1)
    # What was imported is never looked at again when garbage or tensors are sought.
    gc.collect()
    gc.freeze()
    counter = Counter(design=codec.decode(Design, json.loads(design)), whole=whole)
    return tuple(counter.count(rank) for rank in ranks)
