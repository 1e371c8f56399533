"""What attention keeps where the ranks of a context axis divide every sequence, as our own modules run it."""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_keys import all_given
from meshwright.cost.work import FloatArray, Sizes


def kept_by_meeting(
    inside: FloatArray, *, query: FloatArray, own: FloatArray, joined: FloatArray, heads: FloatArray, sizes: Sizes
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
    met = e * m * (2.0 * query + given.own + given.joined) + m * heads * sizes.wide
    return np.where(context > 1.0, met, inside)


def traded_copies(key_heads: FloatArray, sizes: Sizes) -> FloatArray:
    """How often keys and values are repeated, so that the ranks that trade have equal shares of their heads."""
    inner = np.rint(sizes.inner + sizes.zeros).astype(np.int64)
    return np.asarray(inner / np.gcd(np.rint(key_heads + sizes.zeros).astype(np.int64), inner), dtype=np.float64)
