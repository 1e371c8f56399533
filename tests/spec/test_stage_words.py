"""Stages in words: short, and others for other stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.stage_words import stage_words

Stages = tuple[tuple[int, int, int], ...]


def laid(sizes: list[int], ranks: list[int]) -> Stages:
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return tuple((rank, start, start + size) for rank, start, size in zip(ranks, starts, sizes, strict=True))


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ([34], [0], "blocks 0 to 33 on rank 0"),
        ([17, 1], [0, 1], "blocks 0 to 16 on rank 0, 17 on rank 1"),
        ([1] * 34, [0, 1] * 17, "34 stages of 1 block, on ranks 0 to 1 in turn"),
        ([2, *[1] * 6, 2], [0, 1, 2, 3, 3, 2, 1, 0], "8 stages of 2, 1 x 6, 2 blocks, on ranks 0 to 3 there and back"),
        ([3] * 5, [0, 1, 2, 4, 3], "5 stages of 3 blocks, on ranks 0, 1, 2, 4, 3"),
    ],
)
def test_stages_are_told_shortly(sizes: list[int], ranks: list[int], words: str) -> None:
    assert stage_words(laid(sizes, ranks)) == words


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=9), min_size=2, max_size=2)
)
def test_other_stages_have_other_words(drawn: list[list[tuple[int, int]]]) -> None:
    one, other = (laid([size for size, _ in each], [rank for _, rank in each]) for each in drawn)
    assert (stage_words(one) == stage_words(other)) == (one == other)
