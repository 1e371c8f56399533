"""A staged copy is what was copied, in memory that was there before."""

from __future__ import annotations

import resource

import pytest
import torch

from meshwright.train.checkpoint.staging import Staging
from meshwright.train.host_pages import get_pages

NUMBERS = 24 * 2**20
PAGES = 4 * NUMBERS // 4096
WHY_NOT = "" if get_pages(torch.empty(2**20)) else "the system gives pages only one at a time"


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_memory_that_was_got_is_there_when_a_copy_is_taken() -> None:
    x, staging = {"x": torch.ones(NUMBERS)}, Staging()
    staging.prepare(x)
    assert staging._getting is not None
    staging._getting.join()
    before = faults()
    copied = staging.take(x)["x"]
    assert faults() - before < PAGES / 10
    assert torch.equal(copied, x["x"])


def test_a_copy_that_is_taken_early_waits_for_no_memory() -> None:
    x, staging = {"x": torch.ones(NUMBERS), "y": torch.ones(3)}, Staging()
    staging.prepare(x)
    copied = staging.take(x)
    assert staging._getting is None
    assert all(torch.equal(copied[name], x[name]) for name in x)


def test_a_staged_copy_is_of_when_it_was_taken_and_its_memory_is_used_again() -> None:
    x, staging = {"x": torch.arange(2**20, dtype=torch.float32)}, Staging()
    first = staging.take(x)["x"]
    x["x"] += 1.0
    assert torch.equal(first + 1.0, x["x"])
    again = staging.take(x)["x"]
    assert again.data_ptr() == first.data_ptr()
    assert torch.equal(again, x["x"])
