"""The decision: what it picks is what no other legal plan beats, it says why, and misses are told with a way out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright import catalog, cost, search
from meshwright.cost import PlanTable, uncertainty
from meshwright.search import Scope, check, laid_out
from meshwright.search.candidate import TIE
from meshwright.search.decide import explored, legal_space
from meshwright.search.explore import Explorer
from meshwright.search.laid_out import best_refined
from meshwright.search.prices import Prices, may_fit, price
from meshwright.search.refine import refine
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import ConfigError, ExitCode, NoPlanFits
from meshwright.spec.job import Constraints, JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Report
from tests.search import search_samples as samples
from tests.support import searches

LARGE = samples.model(layers=10, layer=samples.dense_layer(hidden=2048), vocab=2048)
FEW_HEADS = samples.model(layers=10, layer=samples.dense_layer(heads=4, hidden=2048), vocab=2048)


def box(*, memory_bytes: float = 16 * 2**30, devices: int = 8) -> ClusterSpec:
    return samples.cluster(samples.nodes(devices_per_node=devices, of=samples.device(memory_bytes=memory_bytes)))


@searches.once
def everything(model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> tuple[PlanTable, Prices]:
    table = legal_space(model, cluster, job).table
    return table, price(table, model=model, cluster=cluster, job=job)


@pytest.mark.parametrize("objective", list(Objective))
def test_no_plan_that_fits_is_better_than_the_best(objective: Objective) -> None:
    """Neither as closed forms tell it nor laid out again as the best was."""
    job = replace(samples.job(sequences=8), objective=objective, constraints=Constraints(devices="any", slowdown=1e9))
    cluster, model = box(devices=4), samples.model(layers=2)
    table, costs = everything(model, cluster, job)
    decision = search.design(model, cluster, job)

    def value(plan: Plan, report: Report) -> float:
        if objective is Objective.MEMORY:
            return report.peak_bytes
        assert report.fit_probability is not None
        upper = report.step_seconds * report.error_band[1] / report.fit_probability
        return upper * (plan.world_size if objective is Objective.COST else 1)

    expected = costs.upper_seconds / costs.fit_probability
    everyone = {
        Objective.TIME: expected,
        Objective.COST: expected * table.world,
        Objective.MEMORY: costs.memory_bytes,
    }[objective]
    best = value(decision.design.plan, decision.report)
    as_good = 1.0 + (1e-9 if objective is Objective.MEMORY else TIE)
    assert decision.settled
    assert best <= float(everyone[costs.fits].min()) * as_good
    near = np.flatnonzero(costs.fits & (everyone < 1.05 * best))
    assert len(near) > 1
    refined = refine(table, [int(row) for row in near], model=model, cluster=cluster, job=job)
    assert best <= min(value(entry.plan, report) for entry, report in refined) * as_good
    plans = [entry.plan for entry in decision.ranked]
    ours = [value(plan, cost.predict(replace(decision.design, plan=plan))) for plan in plans]
    behind = [each for each in ours if each > min(ours) * as_good]
    assert ours[len(ours) - len(behind) :] == behind == sorted(behind)


def test_plans_are_laid_out_again_until_none_promises_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slower than it promised lets others be tried, also such as were not priced, up to a number of them."""
    monkeypatch.setattr("meshwright.search.ladder.FIRST", 2)
    model, job = samples.model(layers=2), samples.job(sequences=32, constraints=Constraints(devices="any"))
    cluster = box(devices=4)
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    found.best(3)
    priced = found.priced
    refined, settled = best_refined(found, 3)
    assert settled
    assert len(refined) < laid_out.MOST * 3
    promised = [made for made, _ in refined[:3]]

    def slowed(*args: Any, **asked: Any) -> list[tuple[Design, Report]]:
        """What was promised takes twice as long laid out again, and all else a little longer."""
        found = []
        for made, report in refine(*args, **asked):
            seconds = report.step_seconds * (2.0 if made in promised else 1.1)
            found.append((made, replace(report, step=replace(report.step, seconds=seconds))))
        return found

    monkeypatch.setattr(laid_out, "refine", slowed)
    others, settled = best_refined(found, 3)
    assert not settled
    assert len(others) == laid_out.MOST * 3
    monkeypatch.setattr(laid_out, "MOST", 50)
    others, settled = best_refined(found, 3)
    assert settled
    assert not any(made in promised for made, _ in others[:3])
    assert found.priced > priced
    assert len(others) > 9


@pytest.mark.parametrize(
    "memory_bytes", [8e6, 5e7, *(pytest.param(most, marks=pytest.mark.slow) for most in (2e7, 2e8))]
)
def test_no_row_that_fits_is_left_unpriced(memory_bytes: float) -> None:
    cluster, job = box(memory_bytes=memory_bytes), samples.job()
    whole = legal_space(LARGE, cluster, job)
    prices = price(whole.table, model=LARGE, cluster=cluster, job=job)
    possible = may_fit(whole.table, model=LARGE, cluster=cluster, job=job)
    assert np.all(possible[prices.fits])
    found = explored(LARGE, cluster, job)
    assert int(found.prices.fits.sum()) == int(prices.fits.sum())
    assert found.priced + found.hopeless == whole.count


def test_slices_are_priced_as_one() -> None:
    job, cluster = samples.job(), box()
    table, prices = everything(LARGE, cluster, job)
    parts = [price(table.take([row]), model=LARGE, cluster=cluster, job=job) for row in range(0, len(table), 307)]
    assert [part.step_seconds[0] for part in parts] == pytest.approx(prices.step_seconds[::307].tolist())
    assert [part.memory_bytes[0] for part in parts] == pytest.approx(prices.memory_bytes[::307].tolist())


def test_a_decision_is_legal_fits_and_survives_a_round_trip() -> None:
    decision = search.design(LARGE, box(), samples.job(), top=3, trainable=True)
    assert check(decision.design) == ()
    assert decision.report.fits
    assert decision.report.plan == decision.design.plan.digest()
    assert len(decision.ranked) == 3
    assert decision.ranked[0].plan == decision.design.plan
    assert decision.considered >= decision.fitting >= 3
    assert codec.decode(search.Decision, json.loads(json.dumps(codec.encode(decision)))) == decision
    assert codec.decode(Design, json.loads(decision.design.to_json())) == decision.design


def test_figures_of_a_candidate_are_those_of_its_report() -> None:
    decision = searches.design(LARGE, box(), samples.job())
    best, report = decision.ranked[0], decision.report
    assert best.step_seconds == report.step_seconds
    assert best.free_bytes == best.capacity_bytes - best.peak_bytes >= 0
    assert 0 <= best.bubble_share < 1
    assert best.total_cost == report.total_cost
    assert best.total_cost is not None


def test_a_plan_too_large_is_rejected_and_counted() -> None:
    need = float(everything(LARGE, box(), samples.job())[1].memory_bytes.min())
    decision = search.design(LARGE, box(memory_bytes=need * 1.5), samples.job())
    memory = decision.rejected[0]
    assert memory.rule == "memory-fits"
    assert memory.count == decision.considered - decision.fitting > 0
    assert ", has " in memory.example
    assert decision.report.fits


def test_why_compares_with_the_best_plan_of_every_other_choice() -> None:
    decision = searches.design(LARGE, box(), samples.job())
    assert any("instead of" in line for line in decision.why)
    assert any("more time" in line or "as long" in line for line in decision.why)
    faster = [line for line in decision.why if "less time" in line]
    assert faster, "this box has one, for the chosen plan has the narrower interval"
    for line in faster:
        assert "; but 19 of 20 of its steps stay under" in line or "; but it fits with" in line


def test_the_closest_miss_names_the_devices_it_would_take() -> None:
    with pytest.raises(NoPlanFits) as raised:
        search.design(LARGE, box(memory_bytes=3e7, devices=1), samples.job())
    assert raised.value.exit_code is ExitCode.NO_PLAN
    text = str(raised.value)
    assert "needs" in text
    assert "rule memory-fits" in text
    assert re.search(r"; \d+ such devices would fit \(", text)


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (Constraints(fix={"pipeline": 1}), "without job.constraints.fix.pipeline "),
        (Constraints(forbid=("pipeline",)), "without job.constraints.forbid[0] "),
        (Constraints(fix={"pipeline": 1, "tensor": 1}), "without job.constraints fix and forbid "),
    ],
)
def test_the_closest_miss_names_the_constraint_to_drop(constraints: Constraints, says: str) -> None:
    table, costs = everything(FEW_HEADS, box(), samples.job())
    least = float(costs.memory_bytes.min())
    held = float(costs.memory_bytes[(table.pipeline == 1) | (table.tensor == 1)].min())
    assert least < held
    cluster = box(memory_bytes=(least + held) / 2 / samples.device().usable_fraction)
    with pytest.raises(NoPlanFits) as raised:
        search.design(FEW_HEADS, cluster, samples.job(constraints=constraints))
    ways = str(raised.value).split("; ")
    assert any(says in way and way.endswith("and fits") for way in ways), ways


def test_a_fixed_value_that_is_never_legal_is_told_with_the_legal_ones() -> None:
    with pytest.raises(NoPlanFits) as raised:
        search.design(samples.model(), box(), samples.job(constraints=Constraints(fix={"tensor": 3})))
    text = str(raised.value)
    assert "job.constraints.fix.tensor: 3 leaves no legal plan" in text
    assert "choose 1, 2, 4 or 8" in text
    assert "3 does not divide 8 heads, rule tensor-divides-heads" in text


@pytest.mark.parametrize("schedule", ["breadth-first", "zb-v"])
def test_a_schedule_of_several_chunks_is_not_told_that_it_has_one(schedule: str) -> None:
    constraints = Constraints(fix={"schedule": schedule, "sync": "co2"})
    with pytest.raises(NoPlanFits) as raised:
        search.design(samples.model(layers=2), box(), samples.job(sequences=3, constraints=constraints))
    text = str(raised.value)
    assert "rule stages-hold-blocks" in text
    assert "chunks-are-interleaved" not in text
    assert "stages-loop" not in text


def test_a_number_of_devices_that_no_plan_fills_is_told() -> None:
    cluster = samples.cluster(samples.nodes(devices_per_node=7))
    job = samples.job(constraints=Constraints(forbid=("pipeline",)))
    with pytest.raises(NoPlanFits) as raised:
        search.design(samples.model(), cluster, job)
    assert "batch-is-asked" in str(raised.value)
    assert "without it" in str(raised.value)


def test_a_batch_of_parts_of_sequences_is_refused_and_another_suggested_with_its_unit() -> None:
    with pytest.raises(ConfigError, match=r"(?s)not whole sequences.*choose 128 tokens \(1 sequence\)"):
        search.design(samples.model(), box(), replace(samples.job(length=128), batch_tokens=100))


def test_what_this_runtime_cannot_train_is_predicted_and_marked() -> None:
    decision = search.design(samples.model(layers=2), BOXES, precise(precision=Precision.FP8_BLOCK))
    assert "fp8-block can be predicted and not trained yet" in " ".join(map(str, decision.predicts_only))
    assert check(decision.design, scopes=frozenset({Scope.PLAN})) == ()


@pytest.mark.slow
def test_refining_never_makes_a_plan_worse() -> None:
    job, cluster = samples.job(length=512), box()
    table, costs = everything(LARGE, cluster, job)
    for row in (int(row) for row in np.flatnonzero(table.pipeline > 1)[::97]):
        _, report = refine(table, [row], model=LARGE, cluster=cluster, job=job)[0]
        own = cost.evaluate(table.take([row]), model=LARGE, cluster=cluster, job=job, every_rank=True)
        upper = uncertainty.upper(own, table.take([row]), model=LARGE, cluster=cluster, job=job)
        found = report.step_seconds * report.error_band[1]
        assert found <= float(upper[0]) * (1 + 1e-9) or not costs.fits[row]
        assert float(own.step_seconds[0]) >= float(costs.step_seconds[row]) * (1 - 1e-9)


def test_two_sites_put_the_pipeline_across_them() -> None:
    sites = (samples.nodes(devices_per_node=2, site=site) for site in ("a", "b"))
    decision = search.design(LARGE, samples.cluster(*sites), samples.job(sequences=32))
    assert decision.design.plan.pipeline > 1
    assert decision.design.plan.axes[0].name.value == "pipeline"


@pytest.mark.slow
def test_of_two_sites_plans_that_cross_between_them_too_often_are_not_priced() -> None:
    """The line between the sites carries one microbatch after another: more than half a million plans were priced."""
    model, job = catalog.load_model("llama-3.1-8b"), catalog.load_job(None)
    decision = search.design(model, catalog.load_cluster("two-sites"), job)
    assert decision.considered > 2_000_000
    assert decision.priced < 20_000


def test_of_sixteen_thousand_devices_one_plan_in_a_thousand_is_priced_without_torch() -> None:
    """Its seconds are told, with their target, by benchmarks/startup and benchmarks/planner."""
    script = """
import sys
from meshwright import catalog, search
job = catalog.load_job(None, sets=["sequence_length=8192", "batch_tokens=16Mi"])
decision = search.design(catalog.load_model("llama-3.1-405b"), catalog.load_cluster("16384xH100"), job)
assert decision.considered > 10_000_000, decision.considered
assert decision.priced < decision.considered / 1000, decision.priced
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_batch_that_all_devices_cannot_share_is_the_cause_and_nothing_is_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> Prices:
        raise AssertionError("no plan needs a price to say that none is legal")

    monkeypatch.setattr("meshwright.search.explore.price", never)
    model, cluster = samples.model(layers=2), box(devices=44)
    for sequences, told in ((2, "are too few for 44 devices, which share at least 11"), (12, "divide over no data")):
        job = samples.job(sequences=sequences)
        with pytest.raises(NoPlanFits) as caught:
            search.design(model, cluster, job)
        (problem,) = caught.value.problems
        assert problem.where == "job.batch_tokens"
        assert told in problem.what
        assert f"choose {11 * job.sequence_length} tokens (11 sequences)" in problem.fix
        assert "devices = any" in problem.fix
    monkeypatch.undo()
    assert search.design(model, cluster, samples.job(sequences=11)).design.plan.data == 11


def test_a_constraint_is_the_cause_where_the_batch_is_not() -> None:
    job = samples.job(sequences=8, constraints=Constraints(fix={"data": 3}))
    with pytest.raises(NoPlanFits, match=r"job\.constraints\.fix\.data"):
        search.design(samples.model(layers=2), box(devices=8), job)


def test_no_plan_of_the_front_is_beaten_in_everything() -> None:
    job = samples.job(constraints=Constraints(devices="any"))
    decision = search.design(LARGE, box(devices=4), job)
    points = [(one.step_seconds * one.error_band[1], one.peak_bytes, one.plan.world_size) for one in decision.front]
    assert 2 <= len(points) <= 8
    for one in points:
        for other in points:
            assert not (all(b <= a for a, b in zip(one, other, strict=True)) and max(other) < max(one) and other != one)
    assert {one.plan.world_size for one in decision.front} != {4}


HALVES, EIGHTS = (Precision.BF16, Precision.FP16), (Precision.FP8, Precision.FP8_BLOCK)
EIGHT = replace(
    samples.device(),
    peak_flops={Precision.FP32: 1e13} | dict.fromkeys(HALVES, 1e14) | dict.fromkeys(EIGHTS, 2e14),
    matrix={**samples.device().matrix, Precision.FP8: samples.device().matrix[Precision.BF16]},
)
BOXES = samples.cluster(samples.nodes(num_nodes=2, devices_per_node=2, of=EIGHT))


def precise(**changes: Any) -> JobSpec:
    return replace(samples.job(sequences=8), **changes)


def test_of_several_precisions_the_best_is_taken_and_the_others_are_told() -> None:
    job = precise(other_precisions=(Precision.FP8, Precision.FP32))
    decision = search.design(LARGE, BOXES, job)
    alone = {
        kind: search.design(LARGE, BOXES, precise(precision=kind)).report
        for kind in (Precision.BF16, Precision.FP8, Precision.FP32)
    }
    best = min(alone, key=lambda kind: alone[kind].step_seconds * alone[kind].error_band[1])
    assert decision.design.plan.first_group.precision is best
    assert decision.report.step_seconds == alone[best].step_seconds
    told = [line for line in decision.why if "numerics differ" in line]
    assert len(told) == 2
    for kind, report in alone.items():
        if kind is not best:
            change = report.step_seconds / alone[best].step_seconds - 1.0
            said = next(line for line in told if line.startswith(f"{kind.value} instead of {best.value}"))
            words = f"{100 * abs(change):.1f} % {'more' if change > 0 else 'less'} time"
            assert f"would take {words if abs(change) >= TIE else 'as long'}" in said


@pytest.mark.parametrize(
    ("constraints", "left"),
    [
        (Constraints(fix={"precision": "fp32"}), {Precision.FP32}),
        (Constraints(forbid=("precision=fp8",)), {Precision.BF16, Precision.FP16}),
        (Constraints(forbid=("precision=bf16", "precision=fp16")), {Precision.FP8}),
    ],
)
def test_constraints_choose_among_precisions(constraints: Constraints, left: set[Precision]) -> None:
    job = precise(other_precisions=(Precision.FP8, Precision.FP16), constraints=constraints)
    table = legal_space(samples.model(layers=2), BOXES, job).table
    assert {tuple(Precision)[int(kind)] for kind in np.unique(table.precision)} == left


def test_precisions_that_cannot_be_are_refused_by_name() -> None:
    small = samples.model(layers=2)
    with pytest.raises(ConfigError) as caught:
        search.design(small, BOXES, precise(other_precisions=(Precision.FP8, Precision.NVFP4)))
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == ("job.other_precisions[1]", "rule precision-known")
    assert problem.what == "device has no nvfp4 arithmetic"
    assert "leave it out" in problem.fix
    every = Constraints(forbid=("precision=bf16", "precision=fp8"))
    with pytest.raises(ConfigError) as caught:
        search.design(small, BOXES, precise(other_precisions=(Precision.FP8,), constraints=every))
    assert [each.where for each in caught.value.problems] == ["job.precision", "job.other_precisions[0]"]
    job = precise(other_precisions=(Precision.FP8_BLOCK,))
    trained = search.design(small, BOXES, job, trainable=True)
    assert trained.design.plan.first_group.precision is Precision.BF16
    (refused,) = (entry for entry in trained.rejected if entry.rule == "runtime-precision")
    assert "precision fp8-block" in refused.example
    (problem,) = search.design(small, BOXES, precise(precision=Precision.FP8_BLOCK), trainable=True).predicts_only
    assert "rule runtime-precision" in problem.why
