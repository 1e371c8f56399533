"""Fingerprints of sequences: numbers that add up to the same whatever the ranks, batches and order they are read in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.data.permute import mix

BITS = 64


def fingerprint(numbers: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> int:
    """The sum modulo 2**64 over rows of a hash of a sequence's number (n,), its tokens and its targets (n, s).

    Sums of unlike sets of sequences are equal once in 2**64 times.
    """
    length = tokens.shape[1]
    places = mix(np.arange(length, dtype=np.uint64))
    pairs = tokens.astype(np.uint64) ^ (targets.astype(np.uint64) << np.uint64(32))
    rows = mix(pairs ^ places).sum(axis=1, dtype=np.uint64)
    return int(mix(rows ^ mix(numbers.astype(np.uint64))).sum(dtype=np.uint64))
