"""What closed forms of a pipeline read: seconds of one microbatch on every rank shown, and detours between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from meshwright.cost.pipeline_live import Live
from meshwright.cost.table import SCHEDULES, BoolArray, IntArray
from meshwright.cost.work import FloatArray
from meshwright.schedule.program import Program
from meshwright.spec.plan import ScheduleKind

_INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one microbatch by pass on every rank shown, shape (rows, ranks).

    `total` over the rank's stages, `first` and `last` on its first and last one, `first_upto` and `last_upto` summed
    over all ranks up to and with this one; `everything` over all stages, shape (rows,).
    """

    total: FloatArray
    first: FloatArray
    last: FloatArray
    first_upto: FloatArray
    last_upto: FloatArray
    everything: FloatArray

    def times(self, share: float) -> RankSeconds:
        """That share of every pass."""
        return RankSeconds(**{field.name: share * getattr(self, field.name) for field in fields(self)})

    def later(self, seconds: FloatArray, shape: Shape) -> RankSeconds:
        """With every pass of every stage longer by `seconds` (rows,)."""
        each, upto = seconds[:, None], seconds[:, None] * (shape.rank + 1.0)
        return RankSeconds(
            total=self.total + each * shape.chunks[:, None],
            first=self.first + each,
            last=self.last + each,
            first_upto=self.first_upto + upto,
            last_upto=self.last_upto + upto,
            everything=self.everything + seconds * shape.chunks * shape.pipeline,
        )

    def less(self, part: RankSeconds) -> RankSeconds:
        """What is left of every pass without `part`."""
        names = [field.name for field in fields(self)]
        return RankSeconds(**{name: getattr(self, name) - getattr(part, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Schedule and position of every row: `rank` and `valid` have shape (rows, ranks), the rest (rows,).

    `slices` None: no microbatch is cut. `tables` are what rows do whose schedule is a table.
    """

    schedule: IntArray
    pipeline: FloatArray
    chunks: FloatArray
    microbatches: FloatArray
    rank: IntArray
    valid: BoolArray
    slices: FloatArray | None = None
    tables: Mapping[int, Program] = field(default_factory=dict)

    @cached_property
    def interleaved(self) -> IntArray:
        """The rows whose schedule is interleaved."""
        return np.flatnonzero(self.schedule == _INTERLEAVED)

    @cached_property
    def live(self) -> Live:
        """What the `interleaved` rows hold."""
        rows = self.interleaved
        columns = ("pipeline", "chunks", "microbatches")
        return Live.of(rank=self.rank[rows], **{name: getattr(self, name)[rows, None] for name in columns})

    @property
    def passed(self) -> FloatArray:
        """How many microbatches pass each rank, shape (rows, ranks): all of them but those whose paths leave it out."""
        found = np.broadcast_to(self.microbatches[:, None], self.rank.shape)
        among = {row: program.paths for row, program in self.tables.items() if program.paths}
        if not among:
            return found
        found = found.copy()
        for row, paths in among.items():
            found[row] = [sum(rank in path for path in paths) for rank in self.rank[row].tolist()]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """RankSeconds with ranks first, shape (ranks, rows), and the sum of the last stages over all ranks (rows,)."""

    total: FloatArray
    first: FloatArray
    last: FloatArray
    first_upto: FloatArray
    last_upto: FloatArray
    whole: FloatArray
    everything: FloatArray

    @classmethod
    def of(cls, seconds: RankSeconds, rows: IntArray, share: FloatArray, *, width: int) -> Way:
        names = ("total", "first", "last", "first_upto", "last_upto")
        turned = {name: np.ascontiguousarray(getattr(seconds, name)[rows, :width].T) * share for name in names}
        return cls(**turned, whole=turned["last_upto"].max(axis=0), everything=seconds.everything[rows] * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """What closed forms read of some rows, ranks first: numpy reduces the first dim of a long array fastest.

    `down` is the forward, `up` what the rank before waits for, `after` the weight gradients. `behind` ranks come after
    each; `across` is the way from the first rank to the last, `around` back to the first, over the slowest link. A
    unit is a microbatch, or a slice of one.
    """

    down: Way
    up: Way
    after: Way
    rank: FloatArray
    behind: FloatArray
    valid: BoolArray
    reach: FloatArray
    across: FloatArray
    around: FloatArray
    pipeline: FloatArray
    chunks: FloatArray
    slices: FloatArray
    units: FloatArray

    @classmethod
    def of(
        cls,
        shape: Shape,
        rows: IntArray,
        *,
        forward: RankSeconds,
        backward: RankSeconds,
        weight: RankSeconds,
        reach: FloatArray,
    ) -> Turned:
        """Of `rows`, without ranks that none has. `backward` is whole, `weight` the part that no rank waits for."""
        width = int(shape.valid[rows].sum(axis=1).max())
        slices = np.ones(len(rows)) if shape.slices is None else shape.slices[rows]
        rank = np.ascontiguousarray(shape.rank[rows, :width].T.astype(np.float64))
        valid = np.ascontiguousarray(shape.valid[rows, :width].T)
        turned = np.ascontiguousarray(reach[rows, :width].T) / slices
        across = np.where(valid, turned, 0.0).max(axis=0)
        pipeline, share = shape.pipeline[rows], 1.0 / slices
        return cls(
            down=Way.of(forward, rows, share, width=width),
            up=Way.of(backward.less(weight), rows, share, width=width),
            after=Way.of(weight, rows, share, width=width),
            rank=rank,
            behind=pipeline - 1.0 - rank,
            valid=valid,
            reach=turned,
            across=across,
            around=across + _longest_hop(turned, rank, valid),
            pipeline=pipeline,
            chunks=shape.chunks[rows],
            slices=slices,
            units=shape.microbatches[rows] * slices,
        )

    def worst(self, values: FloatArray) -> FloatArray:
        """The largest over ranks, shape (rows,)."""
        return np.asarray(np.where(self.valid, values, 0.0).max(axis=0), dtype=np.float64)

    def later(self, prefix: FloatArray, own: FloatArray) -> FloatArray:
        """What the best detour from each rank through a later one gains over staying; at least nothing, (ranks, rows).

        `prefix` sums the way there and back from rank 0, `own` is what a rank does meanwhile if the path stays on it.
        """
        offer = np.where(self.valid, prefix + own, -np.inf)
        best = np.maximum.accumulate(offer[::-1], axis=0)[::-1]
        return np.maximum(best - prefix - own, 0.0)

    def earlier(self, before: FloatArray, own: FloatArray) -> FloatArray:
        """As `later` through an earlier rank; `before` sums the way over the ranks before each."""
        offer = np.where(self.valid, own - before, -np.inf)
        return np.maximum(np.maximum.accumulate(offer, axis=0) + before - own, 0.0)


def _longest_hop(reach: FloatArray, rank: FloatArray, valid: BoolArray) -> FloatArray:
    """Seconds over the slowest link between neighbours, shape (rows,); over links that are not shown, their mean."""
    hops = np.diff(reach, axis=0) / np.maximum(np.diff(rank, axis=0), 1.0)
    return np.asarray(np.where(valid[1:], hops, 0.0).max(axis=0, initial=0.0), dtype=np.float64)
