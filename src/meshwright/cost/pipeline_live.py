"""How many microbatches lie on the stages of an interleaved pipeline's ranks when they hold most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.table import IntArray
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Microbatches on the `first` stage of a rank, on its `last` and on all of those `between`, shape (moments, rows,
    ranks): when the first backward begins, when the last stage has had its round of them, and when the first has."""

    first: FloatArray
    last: FloatArray
    between: FloatArray

    @classmethod
    def of(cls, *, rank: IntArray, pipeline: FloatArray, chunks: FloatArray, microbatches: FloatArray) -> Live:
        """`rank` of shape (rows, ranks), the rest (rows, 1)."""
        most, period, before = chunks * microbatches, chunks * pipeline, (chunks - 1.0) * pipeline
        lead = np.minimum(2.0 * (pipeline - rank - 1.0) + before + 1.0, most)
        forwards = np.minimum(np.stack([lead, lead + pipeline, lead + period - pipeline]), most)
        (begun, begun_last), (ended_last, ended) = (
            _at_ends(passes, pipeline=pipeline, period=period, before=before)
            for passes in (forwards, np.maximum(forwards - lead, 0.0))
        )
        first, last = begun - ended, np.where(chunks > 1.0, begun_last - ended_last, 0.0)
        between = np.where(chunks > 2.0, (lead - first - last) / np.maximum(chunks - 2.0, 1.0), 0.0)
        return cls(first=first, last=last, between=between)

    def most(self, *, first: FloatArray, last: FloatArray, total: FloatArray) -> FloatArray:
        """The most of what each microbatch leaves on the first and the last stage of a rank and on all of them, all of
        shape (rows, ranks)."""
        return np.asarray(
            (self.first * first + self.last * last + self.between * (total - first - last)).max(axis=0),
            dtype=np.float64,
        )


def _at_ends(
    passes: FloatArray, *, pipeline: FloatArray, period: FloatArray, before: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Microbatches that have passed the stage that comes first and the one that comes last, when a rank has done so
    many `passes`: in each `period` as many as there are ranks pass every stage, the last one after `before` others."""
    rounds = np.floor(passes / period)
    inside, whole = passes - rounds * period, rounds * pipeline
    return whole + np.minimum(inside, pipeline), whole + np.maximum(inside - before, 0.0)
