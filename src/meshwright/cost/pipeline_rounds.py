"""Makespans of schedules whose longest path no short formula tells: a few rounds are played, for many rows at once.

A round is one microbatch a rank. In max-plus algebra a schedule of more and more rounds grows by the mean of its
slowest cycle once the first few are done (Baccelli et al., Synchronization and Linearity, 1992, section 3.7). A cycle
between neighbours closes after two or three microbatches, so the growth is measured over a multiple of six.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.cost.pipeline_ranks import RankSeconds, Shape
from meshwright.cost.simulate import StageRows, makespans_of_rows
from meshwright.cost.table import SCHEDULES, IntArray
from meshwright.cost.work import FloatArray
from meshwright.schedule.build import SPLIT, V_SHAPES, problems, program
from meshwright.schedule.graph import Graph, graph
from meshwright.spec.plan import ScheduleKind as Kind

PLAYED = (Kind.INTERLEAVED, *sorted(SPLIT))
MOST_ACTIONS = 5_000  # of one row, all that is played for it: some ten microseconds
_FIRST = 3  # rounds after which the next ones are nearly alike
_CYCLE = 6  # microbatches


def played(
    shape: Shape, *, forward: RankSeconds, backward: RankSeconds, weight: RankSeconds, reach: FloatArray
) -> FloatArray:
    """Seconds of rows whose schedule is played, shape (rows,), not a number for the others.

    Exact up to as many rounds as are played, where stages of a rank between its first and last are alike. Rows that
    would take more than MOST_ACTIONS are left out, and those without a legal schedule.
    """
    rows = np.flatnonzero(np.isin(shape.schedule, [SCHEDULES.index(kind) for kind in PLAYED]) & (shape.pipeline > 1.0))
    seconds = np.full(len(shape.schedule), np.nan)
    columns = [shape.schedule, shape.pipeline, shape.chunks, shape.microbatches]
    kinds, pipeline, chunks, microbatches = (np.asarray(column, dtype=np.int64)[rows] for column in columns)
    few, many = _counts(pipeline, microbatches)
    groups, inverse = np.unique(np.stack([kinds, pipeline, chunks, few, many]), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    members = np.split(rows[order], np.cumsum(np.bincount(inverse))[:-1]) if rows.size else []
    for (code, ranks, loops, low, high), group in zip(groups.T.tolist(), members, strict=True):
        sizes = {"pipeline": ranks, "chunks": loops}
        works = 3 if SCHEDULES[code] in SPLIT else 2
        if works * ranks * loops * (low % high + high) > MOST_ACTIONS:
            continue
        if problems(SCHEDULES[code], microbatches=high, **sizes):
            continue
        stages = _stages(shape, group, code=code, passes=(forward, backward, weight), reach=reach, **sizes)
        late = makespans_of_rows(_graph(code, microbatches=high, **sizes), stages=stages)
        if low < high:
            early = makespans_of_rows(_graph(code, microbatches=low, **sizes), stages=stages)
            late += (shape.microbatches[group] - high) * (late - early) / (high - low)
        seconds[group] = late
    return seconds


def _counts(pipeline: IntArray, microbatches: IntArray) -> tuple[IntArray, IntArray]:
    """How many microbatches are played, fewer and more: whole cycles apart and from all of them, or all of them twice."""
    apart = np.lcm(pipeline, _CYCLE)
    least = _FIRST * pipeline
    few = least + (microbatches - least) % apart
    whole = microbatches <= 2 * few + apart
    return np.where(whole, microbatches, few), np.where(whole, microbatches, few + apart)


def _stages(
    shape: Shape,
    rows: IntArray,
    *,
    code: int,
    pipeline: int,
    chunks: int,
    passes: tuple[RankSeconds, RankSeconds, RankSeconds],
    reach: FloatArray,
) -> StageRows:
    """Seconds of every stage of `rows`; a rank that is not shown is like the one shown before it."""
    every = np.arange(pipeline)
    shown = np.where(shape.valid[rows], shape.rank[rows], pipeline)
    like = (shown[:, :, None] <= every).sum(axis=1) - 1
    after = np.minimum(like + 1, shown.shape[1] - 1)
    at = np.take_along_axis(shown, like, axis=1)
    gap = np.take_along_axis(shown, after, axis=1) - at
    near, far = (np.take_along_axis(reach[rows], places, axis=1) for places in (like, after))
    ways = ((far - near) / np.maximum(gap, 1))[:, :-1].T
    back = ways.max(axis=0, keepdims=True)
    v_shaped = SCHEDULES[code] in V_SHAPES
    still = np.zeros_like(back)
    if v_shaped:
        transfer = np.concatenate([ways, still, ways[::-1], still])
    else:
        transfer = np.concatenate([*([ways, back] * (chunks - 1)), ways, still])

    def of(seconds: RankSeconds) -> FloatArray:
        total, first, last = (
            np.take_along_axis(values[rows], like, axis=1).T for values in (seconds.total, seconds.first, seconds.last)
        )
        if chunks == 1:
            return np.ascontiguousarray(total)
        inner = (total - first - last) / max(chunks - 2, 1)
        return np.concatenate([first, *([inner] * (chunks - 2)), last[::-1] if v_shaped else last])

    forward, backward, weight = (of(seconds) for seconds in passes)
    return StageRows(forward=forward, backward=backward, weight=weight, transfer=transfer)


@lru_cache(maxsize=512)
def _graph(code: int, *, pipeline: int, chunks: int, microbatches: int) -> Graph:
    return graph(program(SCHEDULES[code], pipeline=pipeline, chunks=chunks, microbatches=microbatches))
