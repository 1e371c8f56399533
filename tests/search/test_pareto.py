"""The front: as by brute force, with ties, and fast enough for a whole search."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.search.pareto import pareto

Floats = npt.NDArray[np.float64]


def by_hand(columns: list[list[float]]) -> list[bool]:
    rows = list(zip(*columns, strict=True))

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return [not any(beats(other, row) for other in rows) for row in rows]


@given(st.data())
def test_as_by_hand(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    column = st.lists(st.integers(0, 4).map(float), min_size=count, max_size=count)
    columns = data.draw(st.lists(column, min_size=1, max_size=4))
    assert pareto(*map(np.array, columns)).tolist() == by_hand(columns)


@settings(max_examples=5)
@given(st.integers(0, 1000), st.integers(2, 5))
def test_as_by_hand_where_blocks_and_pivots_matter(seed: int, criteria: int) -> None:
    random = np.random.default_rng(seed)
    columns = [random.integers(0, 40, 1500).astype(np.float64) for _ in range(criteria)]
    assert pareto(*columns).tolist() == by_hand([column.tolist() for column in columns])


def test_equal_rows_are_on_the_front_together() -> None:
    seconds, dollars = np.array([1.0, 1.0, 2.0, 2.0]), np.array([2.0, 2.0, 2.0, 1.0])
    assert pareto(seconds, dollars).tolist() == [True, True, False, True]


def test_rows_that_cannot_be_used_beat_nothing() -> None:
    seconds, dollars = np.array([1.0, 2.0, np.inf, np.nan]), np.array([1.0, 2.0, 0.0, 0.0])
    assert pareto(seconds, dollars).tolist() == [True, False, False, False]
    usable = np.array([False, True, True, True])
    assert pareto(seconds, dollars, usable=usable).tolist() == [False, True, False, False]
    assert not pareto(seconds, dollars, usable=np.zeros(4, dtype=np.bool_)).any()


@pytest.mark.slow
def test_a_million_rows() -> None:
    random = np.random.default_rng(0)
    count = 10**6
    devices = 2.0 ** random.integers(3, 13, count)
    seconds, memory = random.lognormal(size=count), random.lognormal(size=count)
    started = time.perf_counter()
    front = pareto(seconds / devices, memory, seconds, 1.1 * seconds, devices)
    assert 0 < np.count_nonzero(front) < 10_000
    assert time.perf_counter() - started < 20.0
