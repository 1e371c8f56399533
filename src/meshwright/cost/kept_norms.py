"""What backward keeps of norms, written out operator by operator or as one."""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_part import Kept
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Attention, Norm, NormKind, QueryKeyNorm


def kept_norm(norm: Norm, sizes: Sizes) -> Kept:
    """Its input and one or two numbers a token, which layer norms on processors keep in the input's precision."""
    rows = sizes.tokens / sizes.split
    copied = sizes.zeros + norm.parameters
    if norm.kind is NormKind.RMS:
        return Kept(saved=root_mean_square(rows * norm.width, rows, sizes), copied=copied)
    statistics = 2.0 * (sizes.itemsize if sizes.processor else sizes.wide)
    return Kept(saved=rows * (norm.width * sizes.itemsize + statistics), copied=copied)


def root_mean_square(
    elements: FloatArray, rows: FloatArray, sizes: Sizes, *, scaled: bool = True, shared: bool = False
) -> FloatArray:
    """The input and 1 / rms; written out in fp32 a wide input and, before the scale, a wide output.

    `shared`: something else keeps the input already.
    """
    if sizes.composite_norms:
        own = elements * sizes.wide * (1.0 if scaled else 0.0)
        read = np.where((sizes.itemsize < sizes.wide) | (not shared), elements * sizes.wide, 0.0)
        return own + read + rows * sizes.wide
    return elements * sizes.itemsize * (0.0 if shared else 1.0) + rows * sizes.wide


def head_norms(mixer: Attention, query: FloatArray, key: FloatArray, sizes: Sizes) -> FloatArray:
    """Norms of queries and keys: over each head, or over all heads at once, which tensor ranks write out together."""
    if mixer.qk_norm is QueryKeyNorm.NONE:
        return sizes.zeros
    m, scaled = sizes.tokens, mixer.qk_norm is not QueryKeyNorm.UNSCALED
    whole = mixer.qk_norm is QueryKeyNorm.FULL
    found = sizes.zeros
    for features, shared in ((query, False), (key, mixer.shared_key_value and not mixer.value_norm)):
        rows = m * (1.0 if whole else features / mixer.head_dim)
        one = root_mean_square(m * features, rows, sizes, scaled=scaled, shared=shared)
        apart = m * (2.0 * features + 1.0) * sizes.wide
        found = found + (np.where(sizes.tensor > 1.0, apart, one) if whole else one)
    return found


def value_norm(mixer: Attention, key: FloatArray, sizes: Sizes) -> FloatArray:
    """Of values, over each head and without a scale; keys that are values are kept by their own norm already, or as
    they are by a fused core."""
    if not mixer.value_norm:
        return sizes.zeros
    m, as_they_are = sizes.tokens, mixer.rotary is None and not mixer.sinks and mixer.softcap is None
    shared = mixer.shared_key_value and (mixer.qk_norm is not QueryKeyNorm.NONE or as_they_are)
    return root_mean_square(m * key, m * key / mixer.head_dim, sizes, scaled=False, shared=shared)


def head_norm_parameters(mixer: Attention, query: FloatArray, key: FloatArray) -> FloatArray | float:
    if mixer.qk_norm is QueryKeyNorm.FULL:
        return query + key
    return 2.0 * mixer.head_dim if mixer.qk_norm is QueryKeyNorm.HEAD else 0.0
