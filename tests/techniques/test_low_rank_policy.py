"""What low rank training decides, without a run: which matrices, which ranks, when, and whether it pays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright.catalog.ranges import checked_job
from meshwright.cost import low_rank
from meshwright.cost.low_rank import Candidate
from meshwright.spec.cluster import Link, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import JobSpec, Switch
from meshwright.spec.low_rank import Cuttlefish, LowRank, Pufferfish, ranks_of, steps_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.techniques.low_rank import policy
from tests.run.runs import cluster
from tests.support import designs, models
from tests.support.designs import Layout

SQUARE = Candidate(block=2, name="mixer.query", rows=256, columns=256)
FLAT = Candidate(block=3, name="transform.up", rows=1024, columns=256)


def wide(width: int = 64) -> ModelSpec:
    """Four layers of `width` features, each an attention of whole heads and a feed-forward twice as wide."""
    norm = models.NORM.__class__(width=width)
    mixer = models.attention(width=width, heads=4, kv_heads=4, head_dim=width // 4, norm=norm)
    layer = replace(models.model().layers[0], mixer=mixer)
    layer = replace(layer, transform=models.feed_forward(width=width, hidden=2 * width, norm=norm))
    base = models.model(layer=layer)
    return replace(
        base,
        embedding=replace(base.embedding, width=width),
        head=replace(base.head, width=width, norm=norm),
        max_positions=256,
    )


def low(spec: LowRank, *, ranks: int = 2, bandwidth: float | None = None, length: int = 256) -> Design:
    """`wide` on one machine, or on as many as there are ranks joined by links of `bandwidth`."""
    made = designs.design(wide(), Layout(replicate=ranks, batch=8, precision=Precision.FP32))
    job = replace(made.job, sequence_length=length, batch_tokens=8 * length, total_tokens=8000 * length, low_rank=spec)
    here = cluster(ranks)
    if bandwidth is not None:
        link = Link(bandwidth=bandwidth, latency_seconds=1e-4)
        here = replace(here, groups=(replace(here.groups[0], inside=link),))
    return replace(made, job=job, cluster=here, plan=replace(made.plan, sequence_length=length))


def test_candidates_are_large_matrices_of_trained_layers_past_the_first() -> None:
    design = low(Pufferfish(least_dim=64))
    found = low_rank.candidates(design, Pufferfish(least_dim=64))
    assert {one.block for one in found} == {2, 3, 4}
    assert {one.name for one in found if one.block == 2} == {
        *(f"mixer.{name}" for name in ("query", "key", "value", "output")),
        *(f"transform.{name}" for name in ("gate", "up", "down")),
    }
    assert low_rank.candidates(design, Pufferfish(least_dim=65)) == ()
    assert {one.block for one in low_rank.candidates(design, Pufferfish(least_dim=64, dense_layers=3))} == {4}
    still = designs.frozen(design, frozenset({0, 1, 2, 3}))
    assert {one.block for one in low_rank.candidates(still, Pufferfish(least_dim=64))} == {4}


def test_ranks_are_multiples_of_sixteen_that_save_parameters() -> None:
    assert (SQUARE.most, FLAT.most) == (112, 192)
    assert low_rank.rounded(SQUARE, 64.0) == 64
    assert low_rank.rounded(SQUARE, 64.1) == 80
    assert low_rank.rounded(SQUARE, 250.0) == 112
    assert low_rank.rounded(SQUARE, 0.0) == 16
    for one in (SQUARE, FLAT):
        assert one.most * (one.rows + one.columns) < one.rows * one.columns


def test_a_rank_is_the_stable_one_scaled_by_its_share_at_the_start() -> None:
    spec = Cuttlefish(least_ratio=0.1)
    tracks = {SQUARE.key: (50.0, 30.0, 12.5), FLAT.key: (40.0, 38.0)}
    found = policy.found_ranks((SQUARE, FLAT), tracks, spec)
    assert {each.name: each.rank for ranks in found.values() for each in ranks} == {"mixer.query": 64}
    least = policy.found_ranks((SQUARE,), {SQUARE.key: (50.0, 1.0)}, replace(spec, least_ratio=0.25))
    assert least[2][0].rank == 64
    assert policy.rank_share((SQUARE, FLAT), tracks) == pytest.approx((0.25 + 0.95) / 2)


def test_ranks_have_settled_when_they_changed_little_in_each_of_the_last_intervals() -> None:
    spec = Cuttlefish(tolerance=0.01, settled=3)
    falling = [100.0 * 0.9**n for n in range(10)]
    assert not policy.has_settled(falling, spec)
    assert policy.has_settled([*falling, *[falling[-1]] * 12], spec)
    assert not policy.has_settled([7.0] * 3, spec)
    assert policy.has_settled([7.0] * 4, spec)
    tracks = {"a": [7.0] * 4, "b": falling}
    assert not policy.is_due(10, spec, total_steps=100, tracks=tracks)
    assert policy.is_due(50, spec, total_steps=100, tracks=tracks)
    assert policy.is_due(10, spec, total_steps=100, tracks={"a": [7.0] * 4})
    assert not policy.is_due(24, Pufferfish(switch_at=0.25), total_steps=100, tracks={})
    assert policy.is_due(25, Pufferfish(switch_at=0.25), total_steps=100, tracks={})


def test_numbers_below_one_are_shares_of_the_run() -> None:
    assert [steps_of(number, total_steps=200) for number in (0.25, 1, 30, 1e-6)] == [50, 1, 30, 1]


def test_the_learning_rate_rises_again() -> None:
    assert [policy.rate_factor(step, since=10, steps=4) for step in range(10, 16)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_loss_on_its_power_law_stays_and_one_above_it_goes_back() -> None:
    def loss(step: int) -> float:
        return 6.0 - 0.5 * math.log(step)

    before = [loss(step) for step in range(101, 201)]
    after = [loss(step) for step in range(221, 231)]
    good = policy.guard(before, after, switched=200, last=230, tolerance=0.01)
    assert good.expected == pytest.approx(good.loss, rel=1e-3)
    assert not good.broken
    assert policy.guard(before, [x * 1.05 for x in after], switched=200, last=230, tolerance=0.01).broken
    assert policy.guard(before, [math.nan], switched=200, last=230, tolerance=0.01).broken
    assert policy.trend([3.0, 3.5], first_step=9, at=99.0) == pytest.approx(3.25)


def test_on_one_machine_a_small_model_is_declined_and_over_slow_links_it_is_not() -> None:
    spec = Pufferfish(least_dim=64, ratio=0.375)
    here, apart = (_verdict(low(spec, bandwidth=bandwidth), spec) for bandwidth in (None, 12.5e6))
    assert not here.pays
    assert "5.0 % less is asked" in here.words
    assert apart.pays
    assert apart.saved > 0.1 > here.saved
    assert apart.factored.collective_bytes < 0.9 * apart.dense.collective_bytes
    alone = _verdict(low(spec, ranks=1), spec)
    assert not alone.pays
    assert alone.dense.collective_bytes == 0.0


def test_bytes_after_the_switch_are_those_of_the_parameters_left() -> None:
    spec = Pufferfish(least_dim=64)
    found = _verdict(low(spec, bandwidth=12.5e6), spec)
    numbers = 2 * 8.0  # the loss and the norm
    for design, paid in ((low(spec), found.dense), (found.design, found.factored)):
        assert paid.collective_bytes == 4.0 * design.model.parameters + numbers


def test_a_kind_of_matrix_that_would_slow_the_step_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Pufferfish(least_dim=64)

    def paid(design: Design) -> low_rank.Price:
        names = [each.name for ranks in ranks_of(design.model).values() for each in ranks]
        seconds = 10.0 - len(names) + 3.0 * names.count("mixer.query")
        return low_rank.Price(seconds=seconds, collective_bytes=0.0)

    monkeypatch.setattr(low_rank, "price", paid)
    found = _verdict(low(spec), spec)
    assert found.whole == ("mixer.query",)
    assert "mixer.query would not pay" in found.words
    assert not any(each.name == "mixer.query" for ranks in ranks_of(found.design.model).values() for each in ranks)


def _verdict(design: Design, spec: Pufferfish) -> low_rank.Verdict:
    found = low_rank.candidates(design, spec)
    return low_rank.verdict(design, found, low_rank.given_ranks(found, ratio=spec.ratio), gain=spec.gain)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"low_rank": Pufferfish(switch_at=0.0)}, r"low_rank\.switch_at: 0\.0 is not finite and above 0"),
        ({"low_rank": Pufferfish(switch_at=10**9)}, r"low_rank\.switch_at: the switch after step 1,000,000,000"),
        ({"low_rank": Pufferfish(ratio=1.0)}, r"low_rank\.ratio: 1\.0 is not between 0 and 1"),
        ({"low_rank": Cuttlefish(interval=-1.0)}, r"low_rank\.interval: -1\.0"),
        ({"low_rank": Cuttlefish(settled=0)}, r"low_rank\.settled: 0 is less than 1"),
        ({"low_rank": Cuttlefish(gain=1.0)}, r"low_rank\.gain: 1\.0 is not from 0 to below 1"),
        ({"low_rank": Cuttlefish(rollback=0.0)}, r"low_rank\.rollback: 0\.0 is not finite and above 0"),
        ({"low_rank": Cuttlefish(frobenius_decay=-1.0)}, r"low_rank\.frobenius_decay: -1\.0"),
        ({"low_rank": Pufferfish(), "compile": Switch.AUTO}, r"compile: auto does not go with low rank"),
        ({"techniques": ("low_rank",)}, r"techniques: low_rank is named twice"),
    ],
)
def test_settings_that_none_can_have_are_told_with_a_fix(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        checked_job(replace(JobSpec(), **changes))
    assert all(problem.fix for problem in caught.value.problems)


def test_settings_as_they_are_by_default_are_legal() -> None:
    for spec in (Pufferfish(), Cuttlefish()):
        checked_job(replace(JobSpec(), low_rank=spec))
