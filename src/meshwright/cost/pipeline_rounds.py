"""Makespans of schedules whose longest path no short formula tells: a few rounds are played, for many rows at once.

A round is one microbatch a rank. In max-plus algebra a schedule of more and more rounds grows by the mean of its
slowest cycle once the first few are done (Baccelli et al., Synchronization and Linearity, 1992, section 3.7). A cycle
between neighbours closes after two or three microbatches, so the growth is measured over a multiple of six.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from meshwright.cost.pipeline_ranks import RankSeconds, Shape
from meshwright.cost.simulate import StageRows, makespans_of_rows
from meshwright.cost.table import SCHEDULES, BoolArray, IntArray
from meshwright.cost.work import FloatArray
from meshwright.schedule.build import LOOPS, SPLIT, V_SHAPES, problems, program
from meshwright.schedule.graph import Graph, graph
from meshwright.spec.plan import ScheduleKind as Kind

PLAYED = (Kind.INTERLEAVED, *sorted(SPLIT))
MOST_ACTIONS = 5_000  # of one row, all that is played for it: some ten microseconds
_FIRST = 3  # rounds after which the next ones are nearly alike
_CYCLE = 6  # microbatches
_ALIKE, _LONGER, _SLOW = 1.02, 1.25, 0.1  # of a stage: the others, the first over them or them over the last, a hop


def played(
    shape: Shape, *, forward: RankSeconds, backward: RankSeconds, weight: RankSeconds, reach: FloatArray
) -> FloatArray:
    """Seconds of rows whose schedule is played, shape (rows,), not a number for those that closed forms tell.

    Exact up to as many rounds as are played, where stages of a rank between its first and last are alike. Rows that
    would take more than MOST_ACTIONS are left to the closed forms, and those without a legal schedule.
    """
    seconds = np.full(len(shape.schedule), np.nan)
    rows = np.flatnonzero(_among(shape.schedule, PLAYED) & (shape.pipeline > 1.0))
    rows = rows[~_plain(shape, rows, forward=forward, backward=backward, reach=reach)]
    columns = [shape.schedule, shape.pipeline, shape.chunks, shape.microbatches]
    kinds, pipeline, chunks, microbatches = (np.asarray(column, dtype=np.int64)[rows] for column in columns)
    few, many = _counts(pipeline, microbatches)
    values = [reach, *(getattr(each, name) for each in (forward, backward, weight) for name in _NAMES)]
    for (code, ranks, loops), group in _groups(kinds, pipeline, chunks):
        sizes = {"pipeline": ranks, "chunks": loops}
        chosen = rows[group]
        stages = _stages(shape, chosen, values=values, kind=SCHEDULES[code], **sizes)
        for (low, high), part in _groups(few[group], many[group]):
            if not _short(SCHEDULES[code], low=low, high=high, **sizes):
                continue
            some = stages.take(part)
            late = makespans_of_rows(_graph(code, microbatches=high, **sizes), stages=some)
            if low < high:
                early = makespans_of_rows(_graph(code, microbatches=low, **sizes), stages=some)
                late += (microbatches[group[part]] - high) * (late - early) / (high - low)
            seconds[chosen[part]] = late
    return seconds


_NAMES = ("total", "first", "last")


def _plain(shape: Shape, rows: IntArray, *, forward: RankSeconds, backward: RankSeconds, reach: FloatArray) -> BoolArray:
    """Whether closed forms tell the rows within a hundredth: links are fast, all stages but the first and last one are
    alike, the first is not much longer, the last not much shorter, and there are enough microbatches to fill the
    pipeline. H1 asks for fast links alone.
    """
    total, first, last = ((getattr(forward, name) + getattr(backward, name))[rows] for name in _NAMES)
    chunks, valid, rank = shape.chunks[rows, None], shape.valid[rows], shape.rank[rows]
    loops, h1, v_shaped = (_among(shape.schedule[rows], kinds) for kinds in (LOOPS, (Kind.ZERO_BUBBLE_H1,), V_SHAPES))
    begins = rank == 0
    ends = np.where(v_shaped[:, None], begins, rank == shape.pipeline[rows, None] - 1.0)
    inner = (total - first - last) / np.maximum(chunks - 2.0, 1.0)
    least, most = np.full(len(rows), np.inf), np.zeros(len(rows))
    for stage, there in ((first, ~begins), (last, ~ends), (inner, chunks > 2.0)):
        here = valid & there & ((chunks > 1.0) | ~(begins | ends))
        least = np.minimum(least, np.where(here, stage, np.inf).min(axis=1))
        most = np.maximum(most, np.where(here, stage, 0.0).max(axis=1))
    hops = np.diff(reach[rows], axis=1, prepend=0.0) / np.maximum(np.diff(rank, axis=1, prepend=0), 1)
    slowest = np.where(valid, hops, 0.0).max(axis=1)
    full = shape.microbatches[rows] > np.where(loops, 1.0, 2.0) * shape.pipeline[rows]
    opening, closing = (np.where(there, stage, 0.0).max(axis=1) for there, stage in ((begins, first), (ends, last)))
    alike = (most <= _ALIKE * least) & (opening <= _LONGER * least) & (least <= _LONGER * closing)
    shortest = np.where(valid, total, np.inf).min(axis=1) / chunks[:, 0]
    return np.asarray((slowest <= _SLOW * shortest) & (h1 | (alike & full)), dtype=np.bool_)


def _among(schedules: IntArray, kinds: Iterable[Kind]) -> BoolArray:
    return np.isin(schedules, [SCHEDULES.index(kind) for kind in kinds])


def _groups(*columns: IntArray) -> list[tuple[list[int], IntArray]]:
    """The distinct rows of `columns`, and where each stands."""
    if not len(columns[0]):
        return []
    found, inverse = np.unique(np.stack(columns), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    places = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    return list(zip(found.T.tolist(), places, strict=True))


def _counts(pipeline: IntArray, microbatches: IntArray) -> tuple[IntArray, IntArray]:
    """How many microbatches are played, fewer and more: whole cycles apart and from all of them, or all of them."""
    apart = np.lcm(pipeline, _CYCLE)
    least = _FIRST * pipeline
    few = least + (microbatches - least) % apart
    whole = microbatches <= 2 * few + apart
    return np.where(whole, microbatches, few), np.where(whole, microbatches, few + apart)


def _short(kind: Kind, *, pipeline: int, chunks: int, low: int, high: int) -> bool:
    """Whether there is such a schedule, and few enough actions."""
    actions = (3 if kind in SPLIT else 2) * pipeline * chunks * (low % high + high)
    return actions <= MOST_ACTIONS and not problems(kind, pipeline=pipeline, chunks=chunks, microbatches=high)


def _stages(
    shape: Shape, rows: IntArray, *, values: list[FloatArray], kind: Kind, pipeline: int, chunks: int
) -> StageRows:
    """Seconds of every stage of `rows` from `values` by rank; a rank that is not shown is like the one before it."""
    every = np.arange(pipeline)
    shown = np.where(shape.valid[rows], shape.rank[rows], pipeline)
    like = (shown[:, :, None] <= every).sum(axis=1) - 1
    after = np.minimum(like + 1, shown.shape[1] - 1)
    row, column = rows[:, None], np.arange(len(rows))[:, None]
    gap = np.maximum(shown[column, after] - shown[column, like], 1)
    ways = ((values[0][row, after] - values[0][row, like]) / gap)[:, :-1].T
    back, still = ways.max(axis=0, keepdims=True), np.zeros((1, len(rows)))
    v_shaped = kind in V_SHAPES
    transfer = [ways, still, ways[::-1], still] if v_shaped else [*([ways, back] * (chunks - 1)), ways, still]
    ranks = [value[row, like].T for value in values[1:]]

    def of(total: FloatArray, first: FloatArray, last: FloatArray) -> FloatArray:
        if chunks == 1:
            return total
        inner = (total - first - last) / max(chunks - 2, 1)
        return np.concatenate([first, *([inner] * (chunks - 2)), last[::-1] if v_shaped else last])

    forward, backward, weight = (of(*ranks[start : start + 3]) for start in (0, 3, 6))
    return StageRows(forward=forward, backward=backward, weight=weight, transfer=np.concatenate(transfer))


@lru_cache(maxsize=512)
def _graph(code: int, *, pipeline: int, chunks: int, microbatches: int) -> Graph:
    return graph(program(SCHEDULES[code], pipeline=pipeline, chunks=chunks, microbatches=microbatches))
