"""The plans that no other plan beats in everything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
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
    points, back = np.unique(values[rows], axis=0, return_inverse=True)
    kept = np.zeros(len(points), dtype=np.bool_)
    kept[_minimal(points)] = True
    front[rows] = kept[back.reshape(-1)]
    return front


def _minimal(points: Floats) -> npt.NDArray[np.int64]:
    """Indexes of the points that none dominates; they are distinct and in the order of their columns.

    In that order a point is dominated only by one before it. First, the least sum of ranks of each run of points
    strikes out most others at once; what is left is compared in blocks with the front so far.
    """
    found: list[npt.NDArray[np.int64]] = []
    rows = _likely(points)
    front = points[:0]
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        alive = block[~_dominated(points[block], by=front)]
        alive = alive[~_dominated(points[alive], by=points[alive])]
        found.append(alive)
        front = np.concatenate([front, points[alive]])
    return np.concatenate(found)


def _likely(points: Floats) -> npt.NDArray[np.int64]:
    """Indexes in order of the points that a few good ones do not dominate."""
    rows = np.arange(len(points), dtype=np.int64)
    if len(points) < _BLOCK:
        return rows
    scale = np.maximum(points.max(axis=0) - points.min(axis=0), 1e-300)
    score = ((points - points.min(axis=0)) / scale).sum(axis=1)
    tried: Sequence[int] = [*np.argsort(score, kind="stable")[:16], *points.argmin(axis=0)]
    for row in tried:
        pivot = points[row]
        left = points[rows]
        worse = (left >= pivot).all(axis=1) & (left > pivot).any(axis=1)
        rows = rows[~worse]
    return rows


def _dominated(points: Floats, *, by: Floats) -> Mask:
    """Which of `points` another of `by` beats."""
    found = np.zeros(len(points), dtype=np.bool_)
    for start in range(0, len(by), _BLOCK):
        others = by[start : start + _BLOCK, None, :]
        left = np.flatnonzero(~found)
        mine = points[left][None, :, :]
        found[left] |= ((others <= mine).all(axis=2) & (others < mine).any(axis=2)).any(axis=0)
    return found
