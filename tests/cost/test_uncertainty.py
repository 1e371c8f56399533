"""Intervals: which causes widen them, and that tables and single plans agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import PlanTable, evaluate, predict
from meshwright.cost.uncertainty import (
    EVIDENCE_DEVICES,
    EVIDENCE_LENGTH,
    EVIDENCE_SOFTWARE,
    REACH,
    SPREADS,
    Cause,
    by_analogy,
    interval,
    least_upper,
    spread,
    upper,
    weights,
)
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.plan import Design, Recompute, Sharding
from tests.cost.cost_examples import A100, JOB, design, llama, mixed, selene, with_group

SHARES = (Cause.PRODUCTS, Cause.COMPUTE, Cause.COLLECTIVES, Cause.PIPELINE, Cause.DATA, Cause.REST)
PLANS = {
    "one": {},
    "data": {"replicate": 8},
    "sharded": {"shard": 8, "sharding": Sharding.PARAMETERS},
    "tensor": {"tensor": 4, "sequence_parallel": True, "recompute": Recompute.SELECTIVE},
    "pipeline": {"pipeline": 4, "microbatches": 8, "recompute": Recompute.FULL},
}
MEASURED = replace(A100, sources={"matrix": "measured on this device"})


def causes(case: Design) -> dict[Cause, float]:
    table = PlanTable.from_plan(case.plan)
    costs = evaluate(table, model=case.model, cluster=case.cluster, job=case.job)
    found = weights(costs, table, model=case.model, cluster=case.cluster, job=case.job)
    return {cause: float(values[0]) for cause, values in found.items()}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("model", [llama(), mixed()], ids=["llama", "mixed"])
def test_shares_are_of_the_whole_step(name, model):
    found = causes(design(model, selene(nodes=1), **PLANS[name]))
    assert set(found) == set(Cause) == set(SPREADS)
    assert sum(found[cause] for cause in SHARES) == pytest.approx(1.0)
    assert min(found.values()) >= 0.0


def test_a_table_and_a_report_agree():
    cases = [design(llama(), selene(nodes=1), replicate=count) for count in (1, 2, 8)]
    first = cases[0]
    tables = [PlanTable.from_plan(case.plan) for case in cases]
    columns = ("replicate", "tensor", "pipeline", "shard", "microbatches", "microbatch")
    joined = PlanTable.build(
        {name: np.concatenate([getattr(table, name) for table in tables]) for name in columns},
        layouts=tables[0].layouts,
    )
    costs = evaluate(joined, model=first.model, cluster=first.cluster, job=JOB)
    ends = interval(costs, joined, model=first.model, cluster=first.cluster, job=JOB)
    highest = upper(costs, joined, model=first.model, cluster=first.cluster, job=JOB)
    for row, case in enumerate(cases):
        report = predict(case)
        assert report.error_band == pytest.approx((float(ends.low[row]), float(ends.high[row])))
        assert highest[row] == pytest.approx(report.step_seconds * report.error_band[1])


def test_what_is_unknown_widens_the_interval():
    known = design(llama(), selene(nodes=1, device=MEASURED))
    eight = replace(MEASURED, peak_flops={Precision.FP8: 2e15}, matrix={Precision.FP8: A100.matrix[Precision.BF16]})
    other = replace(MEASURED, kind=DeviceKind.ROCM)
    guessed = replace(MEASURED, sources={"matrix": "by analogy with another: measured"})
    wider = {
        Cause.EIGHT_BIT: design(llama(), selene(nodes=1, device=eight), precision=Precision.FP8),
        Cause.VENDOR: design(llama(), selene(nodes=1, device=other)),
        Cause.ANALOGY: design(llama(), selene(nodes=1, device=guessed)),
        Cause.EXPERTS: design(mixed(), selene(nodes=1, device=MEASURED)),
    }
    before = causes(known)
    for cause, case in wider.items():
        assert before[cause] == 0.0
        assert causes(case)[cause] == 1.0
    assert predict(wider[Cause.VENDOR]).error_band[1] > predict(known).error_band[1]


@pytest.mark.parametrize("name", [*EVIDENCE_SOFTWARE, "megatron-core:mla_up_proj", "torch-2024-compiled-fused-loss"])
def test_software_that_was_replayed_is_better_known(name):
    replayed, own = replace(JOB, software=name), replace(JOB, software="torch")
    cases = [design(llama(), selene(nodes=1, device=MEASURED), job=job) for job in (replayed, own)]
    assert [causes(case)[Cause.STACK] for case in cases] == [0.0, 1.0]


def test_machines_that_differ_count_where_a_plan_reaches_them():
    one, two = selene(nodes=1, device=MEASURED), selene(nodes=1, device=replace(MEASURED, name="other"))
    both = replace(one, groups=(*one.groups, *two.groups))
    assert causes(design(llama(), both, replicate=8))[Cause.MIXED] == 0.0
    assert causes(design(llama(), both, replicate=16))[Cause.MIXED] == 1.0
    unlike = {Cause.MIXED: np.ones(1), Cause.DATA: np.zeros(1)}
    assert float(spread(unlike)[0]) == SPREADS[Cause.MIXED]
    assert float(spread(unlike, measured=0.04)[0]) == 0.04  # whole steps were compared on them


def test_beyond_the_evidence_every_doubling_counts():
    large = design(llama(), selene(nodes=EVIDENCE_DEVICES // 2), replicate=4 * EVIDENCE_DEVICES)
    assert causes(large)[Cause.DEVICES] == pytest.approx(2.0)
    long = replace(JOB, sequence_length=8 * EVIDENCE_LENGTH)
    assert causes(design(llama(), selene(nodes=1), job=long))[Cause.LENGTH] == pytest.approx(3.0)
    assert causes(design(llama(), selene(nodes=1)))[Cause.LENGTH] == 0.0


def test_a_measured_machine_is_known_by_its_own_steps():
    case = design(llama(), selene(nodes=1), replicate=8)
    found = causes(case)
    arrays = {cause: np.array([value]) for cause, value in found.items()}
    kept = (Cause.COLLECTIVES, Cause.PIPELINE, Cause.DATA)
    expected = np.sqrt(0.04**2 + sum((found[cause] * SPREADS[cause]) ** 2 for cause in kept))
    assert float(spread(arrays, measured=0.04)[0]) == pytest.approx(float(expected))
    calibrated = replace(case, cluster=replace(case.cluster, step_error=0.04))
    assert np.log(predict(calibrated).error_band[1]) == pytest.approx(REACH * float(expected))
    assert float(spread(arrays)[0]) > float(expected)


def test_a_row_that_cannot_run_is_no_number_and_nobody_minds():
    case = design(llama(), selene(nodes=1))
    table = PlanTable.from_plan(case.plan)
    costs = evaluate(table, model=case.model, cluster=case.cluster, job=JOB)
    broken = replace(
        costs,
        step_seconds=np.array([np.inf]),
        parts={name: np.array([np.nan]) for name in costs.parts},
    )
    assert upper(broken, table, model=case.model, cluster=case.cluster, job=JOB)[0] == np.inf


@given(st.lists(st.floats(0.0, 1.0), min_size=len(Cause), max_size=len(Cause)))
def test_more_of_any_cause_never_narrows(values):
    found = {cause: np.array([value]) for cause, value in zip(Cause, values, strict=True)}
    base = float(spread(found)[0])
    for cause in Cause:
        assert float(spread(found | {cause: found[cause] + 0.1})[0]) > base


def test_an_unsourced_device_is_one_by_analogy():
    assert by_analogy(A100)
    assert not by_analogy(MEASURED)
    assert not by_analogy(with_group(selene(nodes=1), device=MEASURED).groups[0].device)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("error", [None, 0.05])
def test_no_plan_is_surer_than_the_least_upper_end(name, error):
    small, wide = llama(), llama(width=4096, hidden=16384, heads=32, layers=8, vocab=32000)
    for model in (small, wide, mixed()):
        for device in (A100, MEASURED, replace(MEASURED, kind=DeviceKind.ROCM)):
            case = design(model, replace(selene(nodes=1, device=device), step_error=error), **PLANS[name])
            job = replace(case.job, batch_tokens=case.plan.batch_tokens)
            report = predict(case)
            ends = least_upper(
                np.array([0.5, 0.9, 1.0]) * report.step_seconds,
                PlanTable.from_plan(case.plan).take([0, 0, 0]),
                model=model,
                cluster=case.cluster,
                job=job,
            )
            assert np.all(np.diff(ends) > 0.0)
            assert report.step_seconds < ends[-1] <= report.step_seconds * report.error_band[1] * (1.0 + 1e-12)


def test_two_sites_of_the_same_machines_are_not_unlike_ones():
    one = selene(nodes=2)
    near, far = (replace(one.groups[0], name=name, site=name, num_nodes=1) for name in ("near", "far"))
    apart = replace(one, groups=(near, far))
    found = causes(design(llama(), apart, replicate=16))
    assert found[Cause.MIXED] == 0.0
    other = replace(far, device=replace(far.device, name="another"))
    assert causes(design(llama(), replace(apart, groups=(near, other)), replicate=16))[Cause.MIXED] == 1.0
