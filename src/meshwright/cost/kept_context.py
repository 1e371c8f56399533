"""What attention keeps where the ranks of a context axis divide every sequence, as our own modules run it."""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_keys import all_given
from meshwright.cost.table import TOKEN_LAYOUTS, BoolArray
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.exchange import TokenLayout

_ZIGZAG = TOKEN_LAYOUTS.index(TokenLayout.ZIGZAG)
# Blocks of keys, and of their gradients, that are here while a tile of a ring of so many runs goes back: the block that
# is met and the one on its way; this rank's sum, the one that grows, and one that leaves while another comes.
_BLOCKS, _SUMS = (1.0, 1.0, 1.0, 2.0), (1.0, 2.0, 4.0, 4.0)


def kept_by_meeting(
    inside: FloatArray,
    *,
    query: FloatArray,
    output: FloatArray,
    own: FloatArray,
    joined: FloatArray,
    heads: FloatArray,
    sizes: Sizes,
) -> FloatArray:
    """`inside` where no context ranks are; else queries, keys, values and the output as tiles met them, beside the
    output that the last product reads, and the log-sum-exp: no masks and no scores. Of features of a token.

    Keys and values are kept as views of their `own` features; slices put those `joined` behind earlier ones.

    Ranks that trade tokens for heads repeat keys and values that are too few to trade. Shape (combinations,).
    """
    context = np.asarray(sizes.context + sizes.zeros)
    if sizes.unfused or not (context > 1.0).any():
        return inside
    m, e = sizes.tokens, sizes.itemsize
    given = all_given(joined, own, sizes)
    met = e * m * (query + output + given.own + given.joined) + m * heads * sizes.wide
    return np.where(context > 1.0, met, inside)


def meeting_bytes(
    *,
    query: FloatArray,
    output: FloatArray,
    keys: FloatArray,
    heads: FloatArray,
    sizes: Sizes,
    padded: FloatArray | float = 0.0,
    capped: bool = False,
) -> FloatArray:
    """Bytes of a backward in which runs of context ranks meet, beside all that is kept; 0 where no context ranks are.

    Of features of a token: the gradients of the `output` as the ranks traded them and of queries, summed in full
    precision, beside blocks of `keys` and values and of their gradients, and what the largest tile gives. Kernels that
    want values as wide as keys have `padded` features more of values, outputs and both their gradients. None takes
    scores that are `capped`, and none of accelerators those of whole precision: of some queries at a time they are
    written out beside their weights, what the values make of them and its sum, and the slope of the cap.
    """
    context = np.asarray(sizes.context + sizes.zeros)
    if sizes.unfused or not (context > 1.0).any():
        return sizes.zeros
    m, e, wide, given = sizes.tokens, sizes.itemsize, sizes.wide, sizes.attended
    runs = np.maximum(np.rint(context / sizes.inner), 1.0)
    length = np.minimum(runs, len(_BLOCKS)).astype(np.int64) - 1
    blocks, sums = (np.asarray(entries)[length] for entries in (_BLOCKS, _SUMS))
    blocks, sums = np.where(sizes.gathers, runs + 1.0, blocks), np.where(sizes.gathers, runs, sums)
    whole = 2.0 * (output + padded) * (padded > 0.0)
    of_queries, of_keys = query + whole, keys + padded + 0.5 * whole
    layout = _ZIGZAG if sizes.token_layout is None else sizes.token_layout
    halves = (runs > 1.0) & (layout == _ZIGZAG) & ~np.asarray(sizes.gathers)
    most = np.maximum(of_queries / 2.0 + of_keys, of_queries + of_keys / 2.0)
    tile = given * np.where(halves, most, of_queries + of_keys)
    tile = tile + np.where(given > e, given * (2.0 * query + keys + output), 0.0)
    written = (given != 2.0) & (not sizes.processor) | capped
    out = _written_tile(query, keys, heads, sizes, halves=halves, capped=capped)
    tile = np.where(written, np.maximum(tile, out), tile)
    # Between two runs the one sum that comes may be more than what a tile gave.
    latest = np.maximum(tile, np.where((runs == 2.0) & ~np.asarray(sizes.gathers), wide * keys, 0.0))
    met = m * (wide * (query + sums * keys) + e * (output + blocks * keys) + latest)
    return np.where(context > 1.0, met, 0.0)


def _written_tile(
    query: FloatArray, keys: FloatArray, heads: FloatArray, sizes: Sizes, *, halves: BoolArray, capped: bool
) -> FloatArray:
    """Bytes a token of a tile whose scores are written out: those of some queries, their weights, what the values make
    of them, its sum and the slope of a cap; those queries and the sums of keys in full precision; the gradient. Where
    it is not of `halves` of the queries, which see all, what is hidden from each too, a byte for all heads."""
    along = sizes.sequence / np.asarray(sizes.context) * sizes.inner / sizes.slices
    every = sizes.batch * heads / sizes.inner * along**2
    scores = np.minimum(sizes.scores_at_once, every)
    held = (5.0 if capped else 4.0) * scores / sizes.tokens + query * scores / every + keys
    hidden = np.where(halves, 0.0, scores / (sizes.batch * heads / sizes.inner) / sizes.tokens)
    return np.asarray(sizes.wide * held + hidden + sizes.itemsize * query * np.where(halves, 0.5, 1.0))


def traded_copies(key_heads: FloatArray, sizes: Sizes) -> FloatArray:
    """How often keys and values are repeated, so that the ranks that trade have equal shares of their heads."""
    inner = np.rint(sizes.inner + sizes.zeros).astype(np.int64)
    return np.asarray(inner / np.gcd(np.rint(key_heads + sizes.zeros).astype(np.int64), inner), dtype=np.float64)
