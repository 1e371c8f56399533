"""A shuffle without a table: position i of the order is computed, not looked up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 6


def permute(index: npt.NDArray[np.int64], *, size: int, key: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Where each index in [0, size) goes under the permutation of [0, size) that its `key` names.

    A Feistel network over the smallest even number of bits that holds `size`, walked until it lands inside (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002). `key` has one entry an index: indexes with equal
    keys are permuted together.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    place = index.astype(np.uint64)
    outside = np.ones(len(place), dtype=bool)
    while outside.any():
        place[outside] = _network(place[outside], key[outside], half, mask)
        outside = place >= np.uint64(size)
    return place.astype(np.int64)


def mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64 bits of hash a value (the finaliser of SplitMix64, Steele, Lea and Flood 2014); wraps without warning."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _network(
    place: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64], half: np.uint64, mask: np.uint64
) -> npt.NDArray[np.uint64]:
    left, right = place >> half, place & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ mix(key + np.uint64(number))) & mask)
    return (left << half) | right
