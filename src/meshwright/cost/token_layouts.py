"""Which tokens of a sequence each rank of the context axis holds, and how evenly that shares the work.

The work of a query is the number of keys that it sees. A layout is exact whatever it is, for masks follow positions;
it is good where the work of the rank that has the most is that of the mean.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from meshwright.spec.exchange import TokenLayout

IntArray = npt.NDArray[np.int64]

MOST_RUNS = 16  # that a rank holds under the balanced layout: more are more even and make smaller products


def document_starts(documents: npt.NDArray[np.integer]) -> IntArray:
    """Where the document of each position starts, (..., length) from the number of each position's document."""
    edges = np.ones(documents.shape, dtype=bool)
    edges[..., 1:] = documents[..., 1:] != documents[..., :-1]
    places = np.where(edges, np.arange(documents.shape[-1]), 0)
    return np.maximum.accumulate(places, axis=-1)


def first_keys(
    positions: IntArray, *, window: int | None = None, chunk: int | None = None, starts: IntArray | None = None
) -> IntArray:
    """The first position that the query at each of `positions` sees.

    `window` counts the query itself, a `chunk` hides what lies before it, `starts` (length,) is where the document of
    each position of the sequence starts.
    """
    first = np.zeros_like(positions) if starts is None else starts[positions]
    if window is not None:
        first = np.maximum(first, positions - window + 1)
    if chunk is not None:
        first = np.maximum(first, positions // chunk * chunk)
    return first


def last_keys(
    positions: IntArray, *, window: int | None = None, chunk: int | None = None, ahead: IntArray | None = None
) -> IntArray:
    """The last position that the query at each of `positions` sees: its own, or as many further as `ahead` (length,)
    says of each position of the sequence, within `window` and `chunk`."""
    if ahead is None:
        return positions
    last = positions + ahead[positions]
    if window is not None:
        last = np.minimum(last, positions + window - 1)
    if chunk is not None:
        last = np.minimum(last, positions // chunk * chunk + chunk - 1)
    return last


def ahead_of(length: int, *, prefix: int) -> IntArray:
    """How many later keys each position of a sequence sees whose first `prefix` tokens see each other, (length,)."""
    return np.maximum(prefix - 1 - np.arange(length), 0)


def visible_keys(
    length: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    starts: IntArray | None = None,
    ahead: IntArray | None = None,
) -> IntArray:
    """How many keys each query of a sequence sees, (length,); see `first_keys` and `last_keys`."""
    positions = np.arange(length)
    last = last_keys(positions, window=window, chunk=chunk, ahead=ahead)
    return last - first_keys(positions, window=window, chunk=chunk, starts=starts) + 1


def dealt(
    layout: TokenLayout,
    *,
    length: int,
    ranks: int,
    starts: IntArray | None = None,
    ahead: IntArray | None = None,
    traders: int = 1,
    slices: int = 1,
) -> IntArray:
    """The positions that each rank holds in ascending order, (ranks, length / ranks); each of `slices` of the sequence
    is dealt on its own.

    The balanced layout follows the documents that begin at `starts` and the later keys that prefixes see; the others
    do not ask for them. Runs of
    `traders` neighbouring ranks trade tokens for heads and do the work of all their tokens: those are balanced.
    The length of a slice is a multiple of twice the ranks.
    """
    work = visible_keys(length, starts=starts, ahead=ahead).reshape(slices, -1)
    firsts = np.arange(slices) * work.shape[1]
    parts = [
        first + _dealt(layout, part, ranks=ranks, traders=traders) for first, part in zip(firsts, work, strict=True)
    ]
    return np.concatenate(parts, axis=1)


def _dealt(layout: TokenLayout, work: IntArray, *, ranks: int, traders: int) -> IntArray:
    """One slice, whose queries see so many keys each."""
    length = len(work)
    assert length % (2 * ranks) == 0, "two runs for every rank make up the sequence"
    positions = np.arange(length)
    if layout is TokenLayout.CONTIGUOUS:
        return positions.reshape(ranks, -1)
    if layout is TokenLayout.STRIPED:
        return np.ascontiguousarray(positions.reshape(-1, ranks).T)
    if layout is TokenLayout.ZIGZAG:
        runs = positions.reshape(2 * ranks, -1)
        return np.concatenate([runs[:ranks], runs[: ranks - 1 : -1]], axis=1)
    groups = ranks // traders
    each = max(count for count in range(1, MOST_RUNS * traders + 1) if length // groups % count == 0)
    held = positions.reshape(groups * each, -1)[_balanced(work.reshape(groups * each, -1).sum(axis=1), groups=groups)]
    return held.reshape(ranks, -1)


def layout_imbalance(
    layout: TokenLayout,
    *,
    length: int,
    ranks: int,
    traders: int = 1,
    window: int | None = None,
    chunk: int | None = None,
    starts: IntArray | None = None,
    prefix: int = 0,
    slices: int = 1,
) -> float:
    """The work of the rank that has most over the mean, of runs of `traders` ranks that share theirs by trading tokens
    for heads; the first `prefix` tokens see each other. Of several slices each waits for the rank that has most."""
    ahead = ahead_of(length, prefix=prefix) if prefix else None
    held = dealt(layout, length=length, ranks=ranks, starts=starts, ahead=ahead, traders=traders, slices=slices)
    seen = visible_keys(length, window=window, chunk=chunk, starts=starts, ahead=ahead)
    work = seen[held].reshape(ranks // traders, traders, slices, -1).sum(axis=(1, 3)).astype(np.float64)
    return float(work.max(axis=0).sum() / work.mean(axis=0).sum())


def _balanced(work: IntArray, *, groups: int) -> IntArray:
    """Runs of tokens dealt to groups, as many each: (groups, runs of a group) in ascending order.

    The heaviest run left goes to the group that has least and room (longest processing time first); then pairs of
    runs change places between the groups that have most and least while that brings them together.
    """
    room = len(work) // groups
    held: list[list[int]] = [[] for _ in range(groups)]
    least = [(0, group) for group in range(groups)]
    for run in sorted(range(len(work)), key=lambda index: (-int(work[index]), index)):
        total, group = heapq.heappop(least)
        held[group].append(run)
        if len(held[group]) < room:
            heapq.heappush(least, (total + int(work[run]), group))
    for _ in range(len(work)):
        if not _swapped(held, work):
            break
    return np.sort(np.array(held, dtype=np.int64), axis=1)


def _swapped(held: list[list[int]], work: IntArray) -> bool:
    """Whether two runs of the groups with most and least work changed places, the pair that evens them best."""
    totals = [sum(int(work[run]) for run in runs) for runs in held]
    most, least = totals.index(max(totals)), totals.index(min(totals))
    gap = totals[most] - totals[least]
    if gap == 0:
        return False
    gains = work[held[most]][:, None] - work[held[least]][None, :]
    place = np.unravel_index(np.abs(2 * gains - gap).argmin(), gains.shape)
    if not 0 < gains[place] < gap:
        return False
    first, second = (int(index) for index in place)
    held[most][first], held[least][second] = held[least][second], held[most][first]
    return True
