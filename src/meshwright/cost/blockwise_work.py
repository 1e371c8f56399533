"""What attention over context ranks starts and moves beside its scores: tiles that are joined, blocks that travel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.work import FloatArray, PartWork, Sizes

_TRADE_STARTS = 7.0  # to pack, cut and order what is traded, before attention and after it


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCounts:
    """Tiles of all slices of a microbatch on one rank, the mean over the ranks, and how often they read each query and
    each key of a rank."""

    count: FloatArray
    queries: FloatArray
    keys: FloatArray

    @classmethod
    def of(cls, runs: FloatArray, slices: FloatArray) -> TileCounts:
        """Under the zigzag layout: one of the own keys and one of those of every other of `runs`.

        An earlier rank's second run of keys is hidden, and from a later one's the first run of queries. Slices after
        the first see whole what came before them: own keys in a tile more, later ranks' in one more or none.
        """
        others, later = runs - 1.0, slices - 1.0
        return cls(
            count=runs + later * (2.0 + 1.5 * others),
            queries=(1.0 + 0.75 * others + later * (1.0 + runs)) / slices,
            keys=(slices + 1.0) / 2.0 + 0.75 * others * slices,
        )


def with_meetings(part: PartWork, sizes: Sizes) -> PartWork:
    """`part` with what its attention does, where context ranks divide sequences, beside that of one device.

    As parallel.blockwise does it: keys and values are packed, every tile is widened where kernels of processors are,
    and joined by its log-sum-exp (online softmax; Ring attention, 2310.01889); backward adds each tile's gradients.
    Every sequence counts as one document. Where software fuses element-wise work a tile beside the first starts a
    kernel and two that correct sums with it, backward one that adds, and their bytes are not told.
    """
    context, circulated = np.asarray(sizes.context), np.asarray(part.circulated)
    meets = (context > 1.0) & (circulated > 0.0)
    if not meets.any():
        return part
    slices, trades = np.asarray(sizes.slices), np.asarray(sizes.inner) > 1.0
    runs = context / sizes.inner
    tiles = TileCounts.of(runs, slices)
    more = tiles.count - slices
    traded = np.where(trades, _TRADE_STARTS, 0.0) * slices
    if not sizes.eager:
        return replace(
            part, met=np.where(meets, 3.0 * more, 0.0) + traded, met_backward=np.where(meets, 2.0 * more, 0.0) + traded
        )
    # Forward a slice packs (3), makes two results and casts one back (3), and a tile joins (11); a further one starts
    # the kernel, and three casts. Backward a slice packs (3) and makes a gradient (1), and for each run one that goes
    # home (2); a tile adds to three, and casts five.
    narrow = np.where(sizes.attended > sizes.itemsize, 1.0, 0.0)
    forward, backward = _bytes(part, sizes, tiles, runs)
    swapped = np.where(trades, _TRADE_STARTS * np.asarray(part.traded), 0.0)
    return replace(
        part,
        met=np.where(meets, 6.0 * slices + 11.0 * tiles.count + (1.0 + 3.0 * narrow) * more, 0.0) + traded,
        met_backward=np.where(
            meets,
            (4.0 + 2.0 * runs) * slices + 3.0 * tiles.count + more + narrow * (5.0 * tiles.count - slices),
            0.0,
        )
        + traded,
        traffic=part.traffic + np.where(meets, forward, 0.0) + swapped,
        backward_traffic=part.backward_traffic + np.where(meets, backward, 0.0) + swapped,
    )


def _bytes(part: PartWork, sizes: Sizes, tiles: TileCounts, runs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Bytes of copies, sums and casts in both passes: queries are half of what is traded beside keys and values.

    Packing lays keys and values out and joins them, a read and a write each. A tile that is joined is 7 passes over its
    queries' results (the old and the new scaled, and added) and 20 over a number of each query. Backward adds to
    the gradients of a tile's queries and keys, 3 passes, and to those of every other run's keys as they come home.
    """
    e, wide, keys = sizes.itemsize, sizes.wide, np.asarray(part.circulated) / sizes.itemsize
    queries = 0.5 * (np.asarray(part.traded) - np.asarray(part.circulated)) / e
    casts = np.where(sizes.attended > e, sizes.attended + e, 0.0)
    packed = 4.0 * e * keys
    read = tiles.queries * queries + tiles.keys * keys
    joined = wide * tiles.queries * queries * (7.0 + 20.0 / part.score_dim)
    forward = packed + 2.0 * e * queries + wide * queries + joined + casts * (read - queries - keys)
    summed = wide * (queries + runs * keys + 3.0 * read + 3.0 * (runs - 1.0) * keys)
    backward = packed + e * queries + summed + casts * (2.0 * tiles.queries * queries + read - queries)
    return forward, backward
