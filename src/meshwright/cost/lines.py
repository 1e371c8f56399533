"""Linear: seconds of an operation as the quickest of a few lines, latency + bytes * per_byte each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray

_MANY = 1e15  # bytes by which latency no longer tells two lines apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Seconds of one operation: the least over its lines of latency + bytes * per_byte; arrays (lines, rows).

    Every line is one algorithm in one protocol: which is quickest depends on the bytes.
    """

    latency: FloatArray
    per_byte: FloatArray

    def seconds(self, num_bytes: FloatArray | float, *, calls: FloatArray | float = 1.0) -> FloatArray:
        """Seconds of `calls` operations that move `num_bytes` in all; both of shape (rows,) or (rows, ranks)."""
        latency, per_byte = self.latency, self.per_byte
        if np.ndim(num_bytes) == 2 or np.ndim(calls) == 2:
            latency, per_byte = latency[..., None], per_byte[..., None]
        found = latency[0] * calls + per_byte[0] * num_bytes
        for line in range(1, len(latency)):
            found = np.minimum(found, latency[line] * calls + per_byte[line] * num_bytes)
        return np.asarray(found, dtype=np.float64)

    def slowed(self, factor: FloatArray) -> Linear:
        return Linear(latency=self.latency * factor, per_byte=self.per_byte * factor)

    def later(self, seconds: FloatArray) -> Linear:
        return Linear(latency=self.latency + seconds, per_byte=self.per_byte + 0.0 * seconds)

    def take(self, rows: npt.NDArray[np.intp]) -> Linear:
        return Linear(latency=self.latency.take(rows, axis=1), per_byte=self.per_byte.take(rows, axis=1))

    @classmethod
    def line(cls, latency: FloatArray, per_byte: FloatArray) -> Linear:
        """One line from arrays of shape (rows,), or as many as either has."""
        several = np.ndim(latency) > 1 or np.ndim(per_byte) > 1
        first, second = np.atleast_2d(latency), np.atleast_2d(per_byte)
        if several and first.shape != second.shape:
            first, second = np.broadcast_arrays(first, second)
        return cls(latency=first, per_byte=second)


def quickest(several: Sequence[Linear]) -> Linear:
    """The least of `several`, as at most three lines a row.

    They are that of the most bytes, that of the fewest, and that which is lowest where those two meet. What the hull
    of all lines has between them is never under this by more than its kinks there.
    """
    latency = np.concatenate([entry.latency for entry in several])
    per_byte = np.concatenate([entry.per_byte for entry in several])
    if len(latency) <= 3:
        return Linear(latency=latency, per_byte=per_byte)

    def at(num_bytes: FloatArray | float) -> npt.NDArray[np.intp]:
        return np.asarray((latency + per_byte * num_bytes).argmin(axis=0), dtype=np.intp)

    def of(values: FloatArray, index: npt.NDArray[np.intp]) -> FloatArray:
        return np.asarray(np.take_along_axis(values, index[None], axis=0)[0], dtype=np.float64)

    large, small = at(_MANY), at(0.0)
    steeper = of(per_byte, small) - of(per_byte, large)
    later = of(latency, large) - of(latency, small)
    meet = np.where(steeper > 0.0, later / np.where(steeper > 0.0, steeper, 1.0), 0.0)
    between = at(meet)
    kept = [large]
    kept += [small] if (small != large).any() else []
    kept += [between] if ((between != large) & (between != small)).any() else []
    chosen = np.stack(kept)
    return Linear(
        latency=np.take_along_axis(latency, chosen, axis=0), per_byte=np.take_along_axis(per_byte, chosen, axis=0)
    )


def either(condition: BoolArray, yes: Linear, no: Linear) -> Linear:
    """`yes` in rows where `condition` (rows,) holds, else `no`; both of one number of lines, or one of a single one."""
    return Linear(
        latency=np.where(condition, yes.latency, no.latency), per_byte=np.where(condition, yes.per_byte, no.per_byte)
    )
