"""What plans say of low rank training before it is run: what its gate predicts, and what a job without it misses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost import predict
from meshwright.cost.low_rank import candidates, given_ranks, verdict
from meshwright.report.explain import explain
from meshwright.search.low_rank import advise_low_rank, foresee_low_rank
from meshwright.spec.job import Switch
from meshwright.spec.low_rank import Cuttlefish, Dense, LowRank, Pufferfish, switches_last
from meshwright.spec.plan import Design
from meshwright.spec.units import format_bytes, format_seconds
from tests.techniques.test_low_rank_policy import low, wide

SLOW = 12.5e6


def broad(spec: LowRank, *, bandwidth: float | None = SLOW) -> Design:
    return replace(low(spec, bandwidth=bandwidth), model=wide(256))


@pytest.mark.parametrize("spec", [Pufferfish(ratio=0.1), Cuttlefish(least_ratio=0.25)])
def test_the_step_before_and_after_the_switch_is_told_as_the_gate_predicts_it(spec: LowRank) -> None:
    design = broad(spec)
    found = candidates(design, spec)
    ratio = spec.ratio if isinstance(spec, Pufferfish) else spec.least_ratio
    said = verdict(design, found, given_ranks(found, ratio=ratio), gain=spec.gain)
    assert said.dense.collective_bytes > 1.5 * said.factored.collective_bytes
    told, loss = foresee_low_rank(design)
    for paid in (said.dense, said.factored):
        assert f"{format_seconds(paid.seconds)} with {format_bytes(paid.collective_bytes)} in collectives" in told
    assert f"step {switches_last(spec, total_steps=1000):,} of 1,000" in told
    assert f"{ratio:g} of " in told
    assert ("at the latest" in told) == isinstance(spec, Cuttlefish)
    assert f"{ratio:g} of the rank from" in loss
    assert "benchmarks/low_rank/network.py" in loss


def test_a_run_that_will_decline_is_told_why() -> None:
    (small,) = foresee_low_rank(low(Pufferfish(least_dim=64)))
    assert "(pufferfish) declines: a step of" in small
    assert "(5.0 % less is asked)" in small
    (none,) = foresee_low_rank(low(Cuttlefish(), bandwidth=SLOW))
    assert "no matrix of this model may have a rank" in none


def test_models_that_are_low_rank_already_and_jobs_without_it_are_told_nothing() -> None:
    spec = Pufferfish()
    design = broad(spec)
    found = candidates(design, spec)
    thin = replace(design, model=verdict(design, found, given_ranks(found, ratio=0.25), gain=0.0).design.model)
    assert foresee_low_rank(thin) == foresee_low_rank(broad(Dense())) == ()


def test_a_job_that_waits_for_its_links_is_told_what_low_rank_would_save() -> None:
    design = broad(Dense())
    told, _loss = advise_low_rank(design, predict(design))
    assert "less time after its switch" in told
    assert "--set 'job.low_rank.kind=\"pufferfish\"'" in told
    fast, asked = broad(Dense(), bandwidth=1e12), broad(Pufferfish())
    compiled = replace(design, job=replace(design.job, compile=Switch.AUTO))
    for other in (fast, asked, compiled):
        assert advise_low_rank(other, predict(other)) == ()


def test_explain_tells_it_of_a_plan(tmp_path: Path) -> None:
    design = broad(Pufferfish())
    (tmp_path / "plan.json").write_text(design.to_json())
    told = explain(tmp_path / "plan.json").sentences
    assert sum(line.startswith("Low rank training (pufferfish): after step") for line in told) == 1
    assert any(line.startswith("Loss above that of whole matrices") for line in told)
