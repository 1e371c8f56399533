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
    before = 2.0 * (0.5 * (slices + 1.0) - 1.0 / slices) * (key if sizes.processor else np.maximum(query, key))
    if not masked or sizes.processor:
        return read + before
    own = np.where(slices > 1.0, 2.0 * key, 0.0)
    return np.where(query > key, query * (slices + 2.0) + own, read + before)
