"""The plans that no other plan beats in everything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_BLOCK = 512


def pareto(*criteria: Floats, usable: Mask | None = None) -> Mask:
    """Which rows are on the front, shape (rows,): no usable row is as low in all criteria and lower in one.

    Each of `criteria` is (rows,), lower is better, as many as wanted: seconds, bytes, dollars, energy, devices. Rows
    that are equal in all are on the front together or not at all. Rows with a criterion that is not finite never are,
    nor those that `usable` leaves out.
    """
    assert criteria, "a front needs a criterion"
    values = np.stack([np.asarray(column, dtype=np.float64) for column in criteria], axis=1)
    allowed = np.isfinite(values).all(axis=1)
    if usable is not None:
        allowed &= usable
    front = np.zeros(len(values), dtype=np.bool_)
    rows = np.flatnonzero(allowed)
    if not len(rows):
        return front
    rows = rows[_likely(values[rows])]
    points, back = np.unique(values[rows], axis=0, return_inverse=True)
    kept = np.zeros(len(points), dtype=np.bool_)
    kept[_minimal(points)] = True
    front[rows] = kept[back.reshape(-1)]
    return front


def _likely(points: Floats) -> Indexes:
    """Indexes of the points that the front of a few good ones does not dominate: most drop out at once."""
    rows: Indexes = np.arange(len(points), dtype=np.int64)
    if len(points) <= _BLOCK:
        return rows
    scale = np.maximum(points.max(axis=0) - points.min(axis=0), 1e-300)
    score = ((points - points.min(axis=0)) / scale).sum(axis=1)
    good = np.unique(np.concatenate([np.argpartition(score, _BLOCK)[:_BLOCK], points.argmin(axis=0)]))
    pivots = good[~_dominated(points[good], by=points[good])]
    for pivot in points[pivots[np.argsort(score[pivots])]]:
        left = points[rows]
        worse = np.ones(len(rows), dtype=np.bool_)
        better = np.zeros(len(rows), dtype=np.bool_)
        for column, value in zip(left.T, pivot, strict=True):
            worse &= column >= value
            better |= column > value
        rows = rows[~(worse & better)]
    return rows


def _minimal(points: Floats) -> Indexes:
    """Indexes of the points that none dominates; they are distinct and sorted by their columns.

    In that order a point is dominated only by one before it: blocks are compared with the front so far.
    """
    found: list[Indexes] = []
    front = points[:0]
    for start in range(0, len(points), _BLOCK):
        block = points[start : start + _BLOCK]
        alive = np.flatnonzero(~_dominated(block, by=front))
        alive = alive[~_dominated(block[alive], by=block[alive])]
        found.append(start + alive)
        front = np.concatenate([front, block[alive]])
    return np.concatenate(found)


def _dominated(points: Floats, *, by: Floats) -> Mask:
    """Which of `points` another of `by` beats."""
    found = np.zeros(len(points), dtype=np.bool_)
    for start in range(0, len(by), _BLOCK):
        others = by[start : start + _BLOCK, None, :]
        left = np.flatnonzero(~found)
        mine = points[left][None, :, :]
        found[left] |= ((others <= mine).all(axis=2) & (others < mine).any(axis=2)).any(axis=0)
    return found
