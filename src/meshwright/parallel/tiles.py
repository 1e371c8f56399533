"""Tiles: which pieces of a product of queries and keys a mask leaves whole, cuts by its diagonal, or hides.

The queries and keys of two ranks stand in ascending positions, so what a query sees of the other rank's keys is one
run of them, [low, high). Masks that differ by document, window, chunk and layout differ in these two numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshwright.cost.token_layouts import IntArray

MOST_TILES = 16  # of a pair of ranks: beyond, few masked products are faster than many small ones
MASKED_QUERIES = 256  # of one masked product, and keys that make a whole one worth while

_SAME, _STAIR, _OTHER = 0, 1, 2


class Cover(StrEnum):
    """What of a tile is seen: all, what index order leaves, or what its runs of keys say."""

    WHOLE = "whole"
    CAUSAL = "causal"
    MASKED = "masked"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """Queries and keys by their indexes; `low` and `high` of a masked one count from the first of its keys."""

    queries: slice
    keys: slice
    cover: Cover
    low: IntArray | None = None
    high: IntArray | None = None


def seen_runs(keys: IntArray, *, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """(low, high) of the keys at positions `keys`, ascending, that queries see from position `first` to `last`."""
    low = np.searchsorted(keys, first, side="left")
    high = np.searchsorted(keys, last, side="right")
    return low, np.maximum(low, high)


def tiles(low: IntArray, high: IntArray) -> tuple[Tile, ...]:
    """Tiles that cover what queries see, each score once, and none that nothing is seen of."""
    found: list[Tile] = []
    for start, stop, stairs in _segments(low, high):
        if stairs is None or len(found) >= MOST_TILES:
            return tuple(_masked(low, high))
        first, ahead = int(low[start]), int(high[start])
        rows = slice(start, stop)
        if stairs:
            ahead -= 1
            keys = slice(ahead, ahead + stop - start)
            found.append(Tile(queries=rows, keys=keys, cover=Cover.CAUSAL))
        if ahead > first:
            found.append(Tile(queries=rows, keys=slice(first, ahead), cover=Cover.WHOLE))
    return tuple(found)


def _segments(low: IntArray, high: IntArray) -> Iterator[tuple[int, int, bool | None]]:
    """(start, stop, stairs) of runs of queries that see something: the same keys, one more each (`stairs`), or
    neither, which is None and comes of windows and stripes that documents cut."""
    same = low[1:] == low[:-1]
    climb = high[1:] - high[:-1]
    change = np.where(same & (climb == 0), _SAME, np.where(same & (climb == 1), _STAIR, _OTHER))
    change = np.append(change, _OTHER)
    edges = np.append(np.flatnonzero(np.diff(change)) + 1, len(change))
    place, count = 0, len(low)
    while place < count:
        if high[place] == low[place]:
            behind = np.flatnonzero(high[place:] > low[place:])
            place = count if not len(behind) else place + int(behind[0])
            continue
        stop = int(edges[np.searchsorted(edges, place, side="right")])
        kind = change[place]
        if kind == _OTHER:
            if min(stop, count - 1) - place >= 2:
                yield place, stop, None
                return
            yield place, place + 1, False
            place += 1
            continue
        yield place, min(stop + 1, count), bool(kind == _STAIR)
        place = stop + 1


def _masked(low: IntArray, high: IntArray) -> Iterator[Tile]:
    """Runs of queries with the keys that any of them sees: what all see whole where that is much, the rest masked."""
    for start in range(0, len(low), MASKED_QUERIES):
        seeing = start + np.flatnonzero((high > low)[start : start + MASKED_QUERIES])
        if not len(seeing):
            continue
        rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
        ends = int(low[seeing].min()), int(high[seeing].max())
        shared = int(low[seeing].max()), int(high[seeing].min())
        if len(seeing) < rows.stop - rows.start or shared[1] - shared[0] < MASKED_QUERIES:
            yield _piece(rows, low, high, ends)
            continue
        yield Tile(queries=rows, keys=slice(*shared), cover=Cover.WHOLE)
        for edge in ((ends[0], shared[0]), (shared[1], ends[1])):
            if edge[1] > edge[0]:
                yield _piece(rows, low, high, edge)


def _piece(rows: slice, low: IntArray, high: IntArray, keys: tuple[int, int]) -> Tile:
    """The masked tile of what queries see among keys [first, last); where that is nothing the run is empty."""
    first, last = keys
    return Tile(
        queries=rows,
        keys=slice(first, last),
        cover=Cover.MASKED,
        low=np.clip(low[rows], first, last) - first,
        high=np.clip(high[rows], first, last) - first,
    )
