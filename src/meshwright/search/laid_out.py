"""The best rows of what was explored, laid out again until none that is left promises more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshwright.search.alternatives import Alternatives, settle
from meshwright.search.arrangements import Arrangement, placed
from meshwright.search.candidate import TIE
from meshwright.search.explain import Answer, held
from meshwright.search.explore import Explorer
from meshwright.search.orders import WORTH, reorder_alternatives
from meshwright.search.refine import Entry, entry_order, entry_value, refine
from meshwright.search.simple import simplest_first
from meshwright.search.wanted import Wanted
from meshwright.spec.cluster import ClusterSpec

BESIDE = 1.1  # over the value of a plan that is known, below which others are looked for: scores may be too high
LAID = 30  # alternatives of one line that are laid out again at the most
MOST = 3  # times as many plans as are asked for are laid out again at the most
WEIGHED = 1_000_000  # plans weighed again where those laid out again turn out slower than they promised


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What was explored with the machines in one order; where `trainable`, without what this runtime cannot train."""

    arrangement: Arrangement
    found: Explorer
    trainable: bool = False


def best_alternatives(asked: Sequence[Alternatives], *, sides: Sequence[Side], cluster: ClusterSpec) -> list[Answer]:
    """The best of each of `asked`, which are of the first of `sides`, in any order of axes and, of all sides, of
    machines, which stay as they are listed for less than WORTH; and whether all that may be better was weighed. Plans
    are on the devices of `cluster` as it is listed."""
    order, value = _ranking(sides[0].found)
    every = [_answers(sides[0], asked, cluster=cluster)]
    for side in sides[1:]:
        known = [min((value(entry) for entry, _ in each if entry), default=np.inf) for each in zip(*every, strict=True)]
        turned = [one.on(side.found, below=BESIDE * below) for one, below in zip(asked, known, strict=True)]
        every.append(_answers(side, turned, cluster=cluster))
    listed = sorted(range(len(sides)), key=lambda at: not sides[at].arrangement.is_listed)
    found: list[Answer] = []
    for answers in zip(*(every[at] for at in listed), strict=True):
        entries = [entry for entry, _ in answers if entry is not None]
        kept = [entry for entry in entries if value(entry) < value(entries[0]) * (1.0 - WORTH)]
        found.append((min([*entries[:1], *kept], key=order, default=None), all(sure for _, sure in answers)))
    return found


def _answers(side: Side, asked: Sequence[Alternatives], *, cluster: ClusterSpec) -> list[Answer]:
    """As `best_alternatives`, of one order of machines."""
    sure = settle(side.found, asked)
    entries: list[Entry | None] = [None] * len(asked)
    if side.found.priced:
        reorder_alternatives(side.found, asked, trainable=side.trainable)
        entries = best_of(side.found, asked)
    on_devices = iter(placed([entry for entry in entries if entry], side.arrangement, cluster))
    return [(next(on_devices) if entry else None, known) for entry, known in zip(entries, sure, strict=True)]


def best_of(found: Explorer, asked: Sequence[Alternatives]) -> list[Entry | None]:
    """Of each of `asked` the best of its rows laid out again, whose stages may be others but not what it is about; None
    where none scores below what it is to.

    Rows are taken in the order of their scores until the next promises no more, each time more of them, LAID at the
    most; those of all that are asked are laid out together.
    """
    scores, values = found.scores(), [getattr(found.table, one.name) for one in asked]
    order, value = _ranking(found)
    left = [one.rows[np.argsort(scores[one.rows], kind="stable")][:LAID] for one in asked]
    done: list[list[Entry]] = [[] for _ in asked]
    size = 1
    while True:
        limits = [min(map(value, each), default=one.below) for one, each in zip(asked, done, strict=True)]
        taken = [
            (index, int(row))
            for index, limit in enumerate(limits)
            for row in left[index][:size][scores[left[index][:size]] < limit]
        ]
        if not taken:
            return [min(each, key=order, default=None) for each in done]
        laid_out = refine(
            found.table,
            [row for _, row in taken],
            model=found.model,
            cluster=found.cluster,
            job=found.job,
            held=found.held,
            fixed=[held(asked[index].name, int(values[index][row])) for index, row in taken],
            within=found.within,
        )
        for (index, _), entry in zip(taken, laid_out, strict=True):
            done[index].append(entry)
        left, size = [rows[size:] for rows in left], 3 * size


def best_refined(found: Explorer, count: int, *, most: int | None = None) -> tuple[list[Entry], bool]:
    """Plans laid out again that take no longer than they are to, best first and of those as good the simplest, and
    whether no other can be among the `count` best, or as good as the best.

    Plans are taken in the order of their scores until the next promises no more than these reach; a score
    is less than what a plan reaches, but for closed forms that are too long and stages that balance better. At most
    `most` are, MOST times `count` unless that is said.
    """
    order, value = _ranking(found)
    most = MOST * count if most is None else most
    done: dict[int, Entry] = {}
    limit, settled = found.below, True
    while len(done) <= most:
        rows = _next(found, done, limit, most=max(count - len(done), min(len(done), most - len(done)), 1))
        if not rows and len(done) >= count and limit > found.settled:
            (settled,) = found.until(Wanted(limit=partial(float, limit)), most=WEIGHED)
            rows = _next(found, done, limit, most=1)
        if not rows or len(done) == most:
            settled = settled and not rows
            break
        laid_out = refine(
            found.table,
            rows,
            model=found.model,
            cluster=found.cluster,
            job=found.job,
            held=found.held,
            within=found.within,
        )
        done |= zip(rows, laid_out, strict=True)
        values = sorted(map(value, done.values()))
        limit = min(found.below, max(values[count - 1], values[0] * (1.0 + TIE))) if len(values) >= count else limit
    kept = (entry for entry in done.values() if found.within == np.inf or value(entry) < np.inf)
    return simplest_first(sorted(kept, key=order), found.job.objective), settled


def _ranking(found: Explorer) -> tuple[Callable[[Entry], tuple[bool, float, float]], Callable[[Entry], float]]:
    """In what order entries are best, and what the objective minimises of them."""
    asked: dict[str, Any] = {"objective": found.job.objective, "within": found.within}
    return partial(entry_order, **asked), partial(entry_value, **asked)


def _next(found: Explorer, done: Mapping[int, object], limit: float, *, most: int) -> list[int]:
    """The rows with the best scores below `limit` that are not `done`, best first, at most so many."""
    score = np.where(found.prices.fits, found.scores(), np.inf)
    score[list(done)] = np.inf
    best = np.argsort(score, kind="stable")[:most]
    return [int(row) for row in best if score[row] < limit]
