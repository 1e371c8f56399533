"""Schedules made to measure: for stages as uneven as they are and a limit of memory.

List scheduling in several manners and every classic schedule that keeps the limit are the starting points; local
search goes on from the best. The outcome is never slower than the best classic schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic

from meshwright.schedule.build import NAMED, placement, problems, program
from meshwright.schedule.list_schedule import ListSchedule, Manner
from meshwright.schedule.local_search import Budget, improve
from meshwright.schedule.lower_bound import lower_bound
from meshwright.schedule.program import Program
from meshwright.schedule.timing import Timing
from meshwright.schedule.workload import Rows, Workload
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import ScheduleKind as Kind

_DEPTHS = (0.5, 1.0, 1.5, 2.0)  # forwards ahead, in microbatches for each rank behind
_PATIENCE = (0.0, 0.5, 1.0)
_NOISES = (0.0, 0.05, 0.2)
_BOTH = (False, True)
_HEATS = (0.02, 0.005)  # of local searches, one from each of the best orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A legal schedule of `seconds`; no schedule takes less than `bound`, and the best classic one that keeps the
    limit takes `classic` (infinite where none does). `classic_kind` names that one.
    """

    program: Program
    seconds: float
    bound: float
    classic: float
    classic_kind: Kind | None

    @property
    def gap(self) -> float:
        """Share of the bound by which the schedule may be longer than the shortest there is."""
        return self.seconds / self.bound - 1.0


def synthesize(
    work: Workload, *, tries: int = 5000, limit_seconds: float = 10.0, close: float = 1e-9, seed: int = 0
) -> Synthesis:
    """The best schedule found by timing at most `tries` of them, or in `limit_seconds`, or the first that is longer
    than the bound by no more than a share of `close`.

    The same for the same arguments wherever the seconds suffice. Raises ConfigError where none of so many keeps the
    limits.
    """
    timing, bound = Timing.of(work), lower_bound(work)
    enough = bound * (1.0 + close)
    budget = Budget(tries=tries, until=monotonic() + limit_seconds)
    found: list[tuple[float, int, Rows]] = []

    def consider(rows: Rows | None) -> float:
        ends = None if rows is None else timing.ends(rows)
        if rows is None or ends is None or not all(work.fits(rank, row) for rank, row in enumerate(rows)):
            return float("inf")
        found.append((max(ends), len(found), rows))
        return max(ends)

    classics = [(consider(work.rows(made)), kind) for kind, made in _classics(work)]
    classic, named = min(classics, default=(float("inf"), None))
    for manner in _manners(work, number=tries // 5, seed=seed):
        if (found and min(found)[0] <= enough) or not budget.spend():
            break
        consider(ListSchedule(work, timing, manner).run())
    if not found:
        what = f"no schedule of {tries} tries keeps the limits"
        raise ConfigError(Problem(what=what, where="workload.limit_bytes", fix="allow more bytes, or more tries"))
    starts = sorted(found)[: len(_HEATS)]
    each = max(budget.tries, 0) // max(len(starts), 1)
    for heat, (_, _, rows) in zip(_HEATS, starts, strict=False):
        share = Budget(tries=each, until=budget.until)
        consider(improve(rows, work=work, timing=timing, bound=enough, heat=heat, budget=share, seed=seed))
    seconds, _, best = min(found)
    return Synthesis(
        program=work.program(best, whole=_whole(work, best)),
        seconds=seconds,
        bound=bound,
        classic=classic,
        classic_kind=named if classic < float("inf") else None,
    )


def _classics(work: Workload) -> list[tuple[Kind, Program]]:
    """Every classic schedule of these stages on these ranks."""
    chunks, rest = divmod(work.stages, work.ranks)
    found: list[tuple[Kind, Program]] = []
    for kind in NAMED:
        sizes = {"pipeline": work.ranks, "chunks": chunks, "microbatches": work.microbatches}
        known = not rest and not problems(kind, **sizes)
        if known and placement(kind, pipeline=work.ranks, chunks=chunks) == work.placement:
            found.append((kind, program(kind, **sizes)))
    return found


def _manners(work: Workload, *, number: int, seed: int) -> list[Manner]:
    """Manners of list scheduling: those that resemble the classic schedules, and `number` at random."""
    ranks, generator = range(work.ranks), random.Random(seed)
    found = []
    for depth in _DEPTHS:
        slope = tuple(depth * (work.ranks - 1 - rank) + 1.0 for rank in ranks)
        for caps in (slope, (depth * work.ranks,) * work.ranks):
            found += [Manner(caps=caps, forward_first=first, clear=clear) for first in _BOTH for clear in _BOTH]
    for index in range(number):
        manner = Manner(
            caps=tuple(generator.uniform(1.0, 2.0 * work.ranks) for _ in ranks),
            patience=generator.choice(_PATIENCE),
            forward_first=generator.choice(_BOTH),
            reserve=generator.choice(_BOTH),
            deep=generator.choice(_BOTH),
            clear=generator.choice(_BOTH),
            noise=generator.choice(_NOISES),
            seed=seed + index,
        )
        found.append(manner)
    return found


def _whole(work: Workload, rows: Rows) -> frozenset[int]:
    """INPUT halves of the first stage, for which nobody waits, with their WEIGHT right after: whole backwards."""
    return frozenset(
        one
        for row in rows
        for one, after in pairwise(row)
        if after == one + 1 and one % 3 == 1 and one // 3 < work.microbatches
    )
