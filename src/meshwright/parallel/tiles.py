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
MASKED_QUERIES = 256  # of one masked product: fewer queries share fewer hidden keys

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


def seen_runs(
    queries: IntArray, keys: IntArray, *, first: IntArray, last: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """(low, high) of the keys at positions `keys`, ascending, that queries see; `first` is the first position that
    each sees and `last` its last, its own where left out."""
    low = np.searchsorted(keys, first, side="left")
    high = np.searchsorted(keys, queries if last is None else last, side="right")
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
    """Runs of queries with all keys between the first and the last that any of them sees."""
    for start in range(0, len(low), MASKED_QUERIES):
        some, more = low[start : start + MASKED_QUERIES], high[start : start + MASKED_QUERIES]
        seeing = np.flatnonzero(more > some)
        if not len(seeing):
            continue
        rows = slice(start + int(seeing[0]), start + int(seeing[-1]) + 1)
        some, more = low[rows], high[rows]
        first, last = int(some[more > some].min()), int(more.max())
        keys = slice(first, last)
        # A query that sees nothing in between has an empty run wherever it stands.
        yield Tile(
            queries=rows,
            keys=keys,
            cover=Cover.MASKED,
            low=np.clip(some - first, 0, last - first),
            high=np.clip(more - first, 0, last - first),
        )
