"""Forward and backward of the busiest rank by part of the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.cost.machine import Machine
from meshwright.cost.table import IntArray
from meshwright.cost.work import FloatArray
from meshwright.spec.report import LineName


def by_part(
    machines: list[Machine],
    paced: IntArray,
    *,
    of: Callable[[FloatArray], FloatArray],
    counts: FloatArray,
    microbatches: FloatArray,
) -> dict[tuple[str, str], FloatArray]:
    """Seconds of one step by pass and part, each (rows,), on the busiest rank; what is left of a pass is host time.

    `paced` (rows,) is which of the `machines` that rank is as slow as, `of` its column of (rows, ranks), and `counts`
    (rows, ranks, kinds + 1) how many blocks of a kind every rank has.
    """
    found: dict[tuple[str, str], FloatArray] = {}
    for position, entry in enumerate(machines):
        times = np.where(paced == position, microbatches, 0.0)
        for index, block in enumerate(entry.blocks):
            number = of(counts[..., index]) * times
            for name in block.parts:
                forward, backward = block.part_seconds(name)
                for line, seconds in ((LineName.FORWARD, forward), (LineName.BACKWARD, backward)):
                    key = (str(line), name)
                    found[key] = found.get(key, np.zeros_like(number)) + number * seconds
    return found
