"""Learning rates against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from meshwright.spec.job import Decay, LearningRate
from meshwright.train.learning_rate import learning_rate, warmup_steps


def rate(step: int, shape: LearningRate, total: int = 100) -> float:
    return learning_rate(step, shape=shape, peak=1.0, total_steps=total)


def test_warmup_rises_linearly_to_the_peak() -> None:
    shape = LearningRate(warmup_steps=10)
    assert [rate(step, shape) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])


def test_warmup_by_fraction_and_never_longer_than_the_run() -> None:
    assert warmup_steps(LearningRate(warmup_fraction=0.05), total_steps=200) == 10
    assert warmup_steps(LearningRate(warmup_steps=50), total_steps=20) == 20


def test_cosine_starts_at_the_peak_halves_in_the_middle_and_ends_at_the_floor() -> None:
    shape = LearningRate(decay=Decay.COSINE, warmup_steps=1, final_fraction=0.1)
    assert rate(1, shape, total=102) == pytest.approx(1.0)
    assert rate(51, shape, total=102) == pytest.approx(0.55)
    assert rate(101, shape, total=102) == pytest.approx(0.1)
    quarter = 0.1 + 0.45 * (1.0 + math.cos(math.pi / 4))
    assert rate(26, shape, total=102) == pytest.approx(quarter)


def test_wsd_is_flat_then_linear() -> None:
    shape = LearningRate(decay=Decay.WSD, warmup_steps=10, decay_fraction=0.2, final_fraction=0.0)
    assert {rate(step, shape) for step in (10, 50, 79)} == {1.0}
    assert rate(89, shape) == pytest.approx(0.5)
    assert rate(99, shape) == pytest.approx(0.0)


def test_constant_stays_and_the_end_is_kept() -> None:
    assert rate(70, LearningRate(decay=Decay.CONSTANT)) == 1.0
    shape = LearningRate(decay=Decay.COSINE)
    assert rate(5000, shape) == rate(99, shape)


@pytest.mark.parametrize("decay", list(Decay))
@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_short_runs_have_a_rate_for_every_step(decay: Decay, total: int) -> None:
    rates = [rate(step, LearningRate(decay=decay), total=total) for step in range(total)]
    assert all(0.0 < value <= 1.0 for value in rates)
