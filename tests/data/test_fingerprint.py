"""Fingerprints add up whoever reads, and tell what was lost, repeated or changed."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.fingerprint import BITS, fingerprint

RANDOM = np.random.default_rng(0)
NUMBERS = np.arange(100, 112)
TOKENS = RANDOM.integers(0, 50_000, (12, 16))
TARGETS = RANDOM.integers(-100, 50_000, (12, 16))


def of(rows: slice | list[int]) -> int:
    return fingerprint(NUMBERS[rows], TOKENS[rows], TARGETS[rows])


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_parts_add_up_in_any_order(cut: int) -> None:
    assert (of(slice(cut, None)) + of(slice(cut))) % 2**BITS == of(slice(None))
    assert of(RANDOM.permutation(12).tolist()) == of(slice(None))


def test_what_is_lost_repeated_moved_or_changed_is_told() -> None:
    others = [of(slice(11)), of([*range(12), 3]), of([*range(11), 3])]
    others.append(fingerprint(NUMBERS + 1, TOKENS, TARGETS))
    for values in (TOKENS, TARGETS):
        for row, place in ((0, 0), (7, 15)):
            changed = values.copy()
            changed[row, place] += 1
            pair = (changed, TARGETS) if values is TOKENS else (TOKENS, changed)
            others.append(fingerprint(NUMBERS, *pair))
    swapped = TOKENS.copy()
    swapped[4, [2, 3]] = swapped[4, [3, 2]]
    others.append(fingerprint(NUMBERS, swapped, TARGETS))
    assert len({*others, of(slice(None))}) == len(others) + 1
