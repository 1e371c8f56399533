"""Keys and values of slices: what every slice leaves those behind it, and what it puts together with its own.

All slices but the last leave their own, as leaves that gather gradients; all but the first put theirs behind those of
the ones before. Of features of a token, shape (combinations,): a slice has `1 / slices` of a microbatch's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray, Sizes


class GivenKeys(NamedTuple):
    """What of keys and values backward keeps: each slice's own, those put together, what the `first` slice has of such
    kind, and gradients left for earlier ones. The last slice but one has `met` gradients of those that it met."""

    own: FloatArray
    joined: FloatArray
    first: FloatArray
    left: FloatArray
    met: FloatArray


def all_joined(slices: FloatArray) -> FloatArray:
    """Runs of keys that the first `slices` slices of a microbatch put together: 2, then 3, and so on."""
    return np.where(slices > 0.0, slices * (slices + 1.0) / 2.0 - 1.0, 0.0)


def left_share(sizes: Sizes) -> FloatArray:
    """The part of a microbatch whose keys are left to later slices, 0 of one that is whole."""
    return np.asarray(1.0 - 1.0 / np.asarray(sizes.slices + sizes.zeros))


def later_share(sizes: Sizes) -> FloatArray:
    """Of what grows with the keys that a slice meets, the part that all slices but the first have."""
    slices = np.asarray(sizes.slices + sizes.zeros)
    return np.asarray(2.0 * all_joined(slices) / (slices * (slices + 1.0)))


def mean_runs(sizes: Sizes) -> FloatArray:
    """Runs of keys that a slice meets, with its own, on average."""
    return np.asarray(0.5 * (sizes.slices + sizes.zeros + 1.0))


def going_runs(sizes: Sizes) -> FloatArray:
    """Runs that the last slice but one meets, which goes back when memory is highest."""
    return np.maximum(sizes.slices + sizes.zeros - 1.0, 1.0)


def all_given(keys: FloatArray, own: FloatArray, sizes: Sizes) -> GivenKeys:
    """Of `keys` and values in all, kept as views of `own` features."""
    slices, share = np.asarray(sizes.slices + sizes.zeros), left_share(sizes)
    return GivenKeys(
        own=own * np.where(slices > 1.0, share, 1.0),
        joined=keys * all_joined(slices) / slices,
        first=sizes.zeros,
        left=keys * share,
        met=keys * going_runs(sizes),
    )


def given_keys(query: FloatArray, key: FloatArray, own: FloatArray, sizes: Sizes, *, masked: BoolArray) -> GivenKeys:
    """As kernels are given `own` keys and values, `key` features each: for as many heads as queries have on
    accelerators where there is a mask, as there is for all slices of a sequence but the first."""
    slices, plain = np.asarray(sizes.slices + sizes.zeros), all_given(2.0 * key, own, sizes)
    if sizes.processor:
        return plain
    each, repeated = 2.0 * np.maximum(query, key), masked & (query > key)
    return plain._replace(
        own=np.where(repeated & (slices == 1.0), 0.0, plain.own),
        joined=each * all_joined(slices) / slices,
        first=np.where(repeated, each / slices, 0.0),
        met=np.where(slices > 2.0, each * going_runs(sizes), plain.met),
    )
