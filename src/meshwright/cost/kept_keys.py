"""How many features of queries, keys and values the kernels of attention are given, which backward keeps."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray, Sizes


def given_features(query: FloatArray, key: FloatArray, read: FloatArray, sizes: Sizes, *, masked: bool) -> FloatArray:
    """Features of a token that kernels are given: `read`, but with as many keys as queries on accelerators where there
    is a mask, as there is for all slices of a sequence but the first.

    Slices have the keys and values of those before them beside their own, which are kept too.
    """
    slices = np.asarray(sizes.slices + sizes.zeros)
    first = 1.0 / slices
    met = 0.5 * (slices + 1.0) - first
    beside = np.where(query > key, query, key) if not sizes.processor else key
    more = np.where(slices > 1.0, 2.0 * beside * met, 0.0)
    if not masked or sizes.processor:
        return read + more
    spread = np.where((slices > 1.0) & (query > key), 2.0 * key, 0.0)
    return read - 2.0 * key + 2.0 * beside * np.where(slices > 1.0, first, 1.0) + spread + more
