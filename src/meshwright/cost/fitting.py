"""How likely a plan fits: the error of each part of memory, against the room that is left."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import numpy as np

from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray
from meshwright.spec.report import MemoryPart


class Held(StrEnum):
    """Parts of memory by how well they are known: counted state, what backward keeps, what libraries hold; and what
    any run may differ by, such as fragments of the allocator."""

    STATE = "state"
    KEPT = "kept for backward"
    BUFFERS = "buffers and libraries"
    WHOLE = "the whole"


# Standard deviations of log(needed / predicted) that each gives when all of the memory is of it: estimated and printed
# by `python benchmarks/published/spread.py` from published runs that ran or died, every source alike.
SPREADS: Mapping[Held, float] = MappingProxyType(
    {
        Held.STATE: 0.142,
        Held.KEPT: 0.117,
        Held.BUFFERS: 0.163,
        Held.WHOLE: 0.143,
    }
)
_PARTS: Mapping[str, Held] = MappingProxyType(
    {
        MemoryPart.PARAMETERS: Held.STATE,
        MemoryPart.GRADIENTS: Held.STATE,
        MemoryPart.OPTIMIZER: Held.STATE,
        MemoryPart.ACTIVATIONS: Held.KEPT,
        MemoryPart.LOGITS: Held.KEPT,
    }
)


def probability(
    memory: Mapping[str, FloatArray],
    *,
    capacity: FloatArray,
    valid: BoolArray,
    host: FloatArray | None = None,
    host_room: FloatArray | None = None,
    spreads: Mapping[Held, float] = SPREADS,
) -> FloatArray:
    """The probability that every rank fits, shape (rows,); `memory` by part, `capacity` and `valid` are (rows, ranks),
    as are bytes in the `host`'s memory and the room there.

    Errors are those of the model, alike for all ranks of a plan: the fullest rank decides. The logarithm of what is
    needed over what is predicted is taken as logistic, whose tails are heavier than the normal's.
    """
    total = np.maximum(np.sum(list(memory.values()), axis=0), 1.0)
    room = np.log(np.maximum(capacity, 1.0) / total)
    deviations = room / spread(memory, spreads=spreads)
    if host is not None and host_room is not None and host.any():
        away = np.log(host_room / np.maximum(host, 1.0)) / np.hypot(spreads[Held.KEPT], spreads[Held.WHOLE])
        deviations = np.where(host > 0.0, np.minimum(deviations, away), deviations)
    return np.asarray(chance(np.where(valid, deviations, np.inf).min(axis=1)))


def most_likely(total: FloatArray, *, capacity: FloatArray | float) -> FloatArray:
    """What `probability` is at the most where a rank needs `total` bytes or more and has `capacity`, shape (rows,).

    Errors of shares that are one in sum vary least where each share is as the inverse square of its spread, and most
    where all is of one part: then what is larger than its room fits most often.
    """
    squares = [SPREADS[part] ** 2 for part in Held if part is not Held.WHOLE]
    least, most = (
        np.sqrt(parts + SPREADS[Held.WHOLE] ** 2) for parts in (1.0 / sum(1.0 / each for each in squares), max(squares))
    )
    room = np.log(np.maximum(capacity, 1.0) / np.maximum(total, 1.0))
    return chance(room / np.where(room > 0.0, least, most))


def spread(memory: Mapping[str, FloatArray], *, spreads: Mapping[Held, float] = SPREADS) -> FloatArray:
    """Standard deviation of log(needed / predicted) of every rank, shape (rows, ranks)."""
    squares = [np.square(share * spreads[part]) for part, share in shares(memory).items()]
    return np.asarray(np.sqrt(np.sum(squares, axis=0)))


def shares(memory: Mapping[str, FloatArray]) -> dict[Held, FloatArray]:
    """Of the memory of every rank, by how well it is known; `Held.WHOLE` is one."""
    total = np.maximum(np.sum(list(memory.values()), axis=0), 1.0)
    found = {part: np.zeros(total.shape) for part in Held}
    for name, values in memory.items():
        part = _PARTS.get(name, Held.BUFFERS)
        found[part] = found[part] + values / total
    return found | {Held.WHOLE: np.ones(total.shape)}


def chance(deviations: FloatArray) -> FloatArray:
    """The share of a logistic variable of standard deviation one that is under `deviations`."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(deviations * np.pi / np.sqrt(3.0), -500.0, 500.0))))
