"""Batches that are told by their parts."""

from __future__ import annotations

import pytest

from meshwright.replay.express import express
from meshwright.replay.published import replay
from tests.replay.test_validate import row

RATE = {"iter_s": "", "tflops_gpu": "100", "flop_conv": "3x fwd, full attention"}


def test_a_rate_is_a_time_where_the_batch_is_a_product() -> None:
    whole, parts = row(**RATE), row(**RATE, gbs="", ga="8")
    assert parts.seconds == whole.seconds
    assert parts.seconds is not None


@pytest.mark.parametrize("dp", ["8", ""])
def test_a_blank_accumulation_is_one_microbatch(dp: str) -> None:
    run = row(gbs="", ga="", pp="1", dp=dp)
    found = express(run)
    assert (found.design.plan.microbatch, found.design.plan.batch) == (2, 16)
    assert "one microbatch a step: neither gbs nor ga is printed" in found.assumed
    assert run.tokens == 16 * 2048


def test_a_pipeline_is_not_left_with_one_microbatch() -> None:
    assert replay(row(gbs="", ga="")).reason == "gbs is not printed"
    assert replay(row(gbs="", ga="", mbs="", pp="1", dp="8")).reason == "gbs is not printed"


def test_nothing_is_assumed_of_a_batch_that_is_printed() -> None:
    assert not any("a step" in told for told in express(row(ga="", pp="1", dp="8")).assumed)
