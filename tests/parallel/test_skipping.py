"""Data ranks that each run other parts of a module give what one device gives, or are told that they cannot."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from tests.parallel import skipping_cases
from tests.support.pool import Pool

MANNERS: tuple[dict[str, Any], ...] = (
    {"replicate": 2},
    *({"shard": 2, "sharding": sharding} for sharding in ("zero1", "zero2", "zero3")),
)


def same(found: skipping_cases.Gradients, expected: skipping_cases.Gradients) -> None:
    assert {name for name, x in found.items() if x is None} == {name for name, x in expected.items() if x is None}
    for name, x in expected.items():
        if x is not None:
            numpy.testing.assert_allclose(found[name], x, atol=1e-12, rtol=0, err_msg=name)


@pytest.mark.parametrize("degrees", MANNERS, ids=str)
def test_experts_in_a_block_may_be_skipped_by_some_data_ranks_and_by_all(pool: Pool, degrees: dict[str, Any]) -> None:
    expected = skipping_cases.mixed_on_one_device()
    assert sum(x is None for x in expected.values()) == 8
    for found in pool.run(skipping_cases.mixed_on_one_rank, degrees, ranks=2):
        same(found, expected)


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_blocks_that_all_data_ranks_leave_out_get_no_gradient(pool: Pool, sharding: str) -> None:
    expected = skipping_cases.dropped_on_one_device((0, 3))
    for found in pool.run(skipping_cases.dropped_on_one_rank, sharding, (0, 3), ranks=2):
        same(found, expected)


@pytest.mark.parametrize(
    ("sharding", "runs", "unread", "words"),
    [
        ("zero3", ((0, 2), (1, 3)), ((), ()), ("runs layers.0", "runs layers.1")),
        ("zero2", ((0, 1, 2), (0, 1)), ((), ()), ("runs layers.2", "ends its forward")),
        ("zero3", ((0, 1), (0, 1)), ((1,), ()), ("goes back through layers.0", "goes back through layers.1")),
        ("zero2", ((0, 1), (0, 1)), ((0, 1), (0,)), ("reduces gradients of Dropping", "goes back through layers.1")),
    ],
    ids=["others", "fewer", "others read", "fewer read"],
)
def test_data_ranks_that_run_unlike_blocks_are_told_which(
    pool: Pool, sharding: str, runs: Any, unread: Any, words: tuple[str, str]
) -> None:
    first, second = pool.run(skipping_cases.told, sharding, runs, unread, ranks=2)
    assert f"this rank {words[0]} where rank 1 {words[1]}" in first
    assert f"this rank {words[1]} where rank 0 {words[0]}" in second
    assert "let all data ranks run the same blocks in one order" in first
