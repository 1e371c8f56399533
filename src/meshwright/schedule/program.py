"""A schedule's table as arrays: the one form in which schedules are made, timed and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from meshwright.schedule.paths import Paths
from meshwright.schedule.table import Action, Table, Work

Ids = npt.NDArray[np.int64]

WORKS = tuple(Work)
FORWARD, BACKWARD, INPUT, WEIGHT = range(len(WORKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Every action of a schedule, row by row; `rank`, `work` (an index into WORKS), `stage`, `microbatch` and `slice`
    have shape (actions,).

    Row r is what pipeline rank r does, in order: actions [starts[r], starts[r + 1]). `paths` are those of its
    microbatches, () where all pass every stage in turn.
    """

    work: Ids
    stage: Ids
    microbatch: Ids
    slice: Ids
    starts: Ids
    stages: int
    microbatches: int
    slices: int
    paths: Paths = ()

    def __len__(self) -> int:
        return len(self.work)

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    @property
    def rank(self) -> Ids:
        return np.repeat(np.arange(self.ranks), np.diff(self.starts))

    def whole(self) -> Program:
        """The schedule with every backward whole, where its first half was."""
        kept = np.flatnonzero(self.work != WEIGHT)
        return replace(
            self,
            work=np.where(self.work == INPUT, BACKWARD, self.work)[kept],
            **{name: getattr(self, name)[kept] for name in ("stage", "microbatch", "slice")},
            starts=np.searchsorted(kept, self.starts),
        )

    def halved(self) -> Program:
        """The schedule with every backward in two halves, one after the other."""
        times = np.where(self.work == BACKWARD, 2, 1)
        place = np.repeat(np.arange(len(self)), times)
        later = np.append(False, place[1:] == place[:-1])
        whole = self.work[place] == BACKWARD
        return replace(
            self,
            work=np.where(whole, np.where(later, WEIGHT, INPUT), self.work[place]),
            **{name: getattr(self, name)[place] for name in ("stage", "microbatch", "slice")},
            starts=np.searchsorted(place, self.starts),
        )

    @classmethod
    def of(cls, rows: Sequence[Ids], *, stages: int, microbatches: int, slices: int = 1, paths: Paths = ()) -> Program:
        """From rows of shape (actions, 4): work, stage, microbatch, slice."""
        work, stage, microbatch, part = np.concatenate(rows).T.astype(np.int64)
        return cls(
            work=work,
            stage=stage,
            microbatch=microbatch,
            slice=part,
            starts=np.cumsum([0, *(len(row) for row in rows)]),
            stages=stages,
            microbatches=microbatches,
            slices=slices,
            paths=paths,
        )

    @classmethod
    def from_table(cls, table: Table, *, stages: int, paths: Paths = ()) -> Program:
        """The same schedule; the table has an action of the last microbatch and slice."""
        rows = [
            np.array([(WORKS.index(a.work), a.stage, a.microbatch, a.slice) for a in row], dtype=np.int64).reshape(
                -1, 4
            )
            for row in table
        ]
        last = np.concatenate(rows).max(axis=0, initial=0)
        return cls.of(rows, stages=stages, microbatches=int(last[2]) + 1, slices=int(last[3]) + 1, paths=paths)

    def table(self) -> Table:
        actions = [
            Action(work=WORKS[work], stage=stage, microbatch=microbatch, slice=part)
            for work, stage, microbatch, part in zip(
                self.work.tolist(), self.stage.tolist(), self.microbatch.tolist(), self.slice.tolist(), strict=True
            )
        ]
        starts = self.starts.tolist()
        return tuple(tuple(actions[start:stop]) for start, stop in pairwise(starts))
