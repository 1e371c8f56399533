"""What a job is trained in that says no precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from meshwright import search
from meshwright.search.job_rules import allowed_precisions
from meshwright.search.used import used_of
from meshwright.spec.cluster import DeviceSpec, Precision
from meshwright.spec.job import Automatic, Constraints, JobSpec, Objective, Order
from tests.search import search_samples as samples
from tests.search.test_decide import BOXES, LARGE
from tests.support.sampled import sampled


def job(**changes: Any) -> JobSpec:
    return replace(samples.job(sequences=8), **changes)


@pytest.mark.parametrize(
    ("peaks", "taken"),
    [
        ({Precision.BF16: 200.0, Precision.FP32: 100.0}, {Precision.BF16}),
        ({Precision.BF16: 2.0, Precision.FP32: 100.0}, {Precision.BF16, Precision.FP32}),
        ({Precision.FP16: 200.0, Precision.FP32: 100.0}, {Precision.FP16, Precision.FP32}),
        ({Precision.FP32: 100.0}, {Precision.FP32}),
    ],
)
def test_a_job_that_says_no_precision_is_trained_in_what_the_devices_are_best_at(
    peaks: Mapping[Precision, float], taken: set[Precision]
) -> None:
    group = BOXES.groups[0]
    device = replace(
        group.device, peak_flops=peaks, matrix=dict.fromkeys(peaks, next(iter(group.device.matrix.values())))
    )
    cluster = replace(BOXES, groups=(replace(group, device=device),))
    assert set(allowed_precisions(job(precision=Automatic.AUTO), cluster)) == taken
    assert set(allowed_precisions(job(precision=Precision.BF16), cluster)) == {Precision.BF16}
    fixed = job(precision=Automatic.AUTO, constraints=Constraints(fix={"precision": "fp32"}))
    assert allowed_precisions(fixed, cluster) == (Precision.FP32,)


SCOPES = frozenset({search.Scope.PLAN, search.Scope.JOB, search.Scope.MEMORY})
FEW, MANY = (Precision.FP32, Precision.FP16), (Precision.FP32, Precision.FP16, Precision.BF16)
OLD, NEW = (
    replace(
        samples.device(name=name, speed=speed),
        peak_flops={kind: (1e13 if kind is Precision.FP32 else 1e14) * speed for kind in kinds},
    )
    for name, speed, kinds in (("old", 0.001, FEW), ("new", 1.0, MANY))
)


@pytest.mark.parametrize(
    "objective",
    [Objective.TIME, *(pytest.param(each, marks=pytest.mark.slow) for each in (Objective.MEMORY, Objective.COST))],
)
@pytest.mark.parametrize(
    ("order", "kinds"),
    sampled(product(Order, [(OLD, NEW), (NEW, OLD)]), quick=1),
    ids=lambda value: getattr(value, "value", None),
)
def test_a_precision_follows_the_devices_that_a_plan_uses(
    kinds: tuple[DeviceSpec, ...], order: Order, objective: Objective
) -> None:
    """Those of two kinds have fp16 in common, and the new ones bf16 where they are alone."""
    machines = samples.cluster(*(samples.nodes(devices_per_node=2, of=kind) for kind in kinds))
    constraints = Constraints(devices="any", order=order)
    asked = job(precision=Automatic.AUTO, constraints=constraints, objective=objective)
    decision = search.design(LARGE, machines, asked)
    seen = set()
    for each in decision.ranked:
        made = replace(decision.design, plan=each.plan)
        names = {group.device.name for group in used_of(each.plan, machines).groups}
        taken = each.plan.first_group.precision
        seen.add((frozenset(names), taken))
        assert taken in ((Precision.BF16,) if names == {"new"} else FEW)
        assert search.check(made, scopes=SCOPES) == ()
    if objective is not Objective.MEMORY and (order is Order.ANY or kinds[0] is NEW):
        assert (frozenset({"new"}), Precision.BF16) in seen
    whole = replace(asked, constraints=replace(constraints, devices="all"))
    assert search.design(LARGE, machines, whole).design.plan.first_group.precision in FEW


def test_a_plan_of_part_of_the_machines_is_in_no_precision_of_them_all() -> None:
    machines = samples.cluster(*(samples.nodes(devices_per_node=2, of=kind) for kind in (NEW, OLD)))
    constraints = Constraints(devices="any", fix={"devices": 2})
    asked = job(precision=Automatic.AUTO, constraints=constraints)
    made = search.design(LARGE, machines, asked).design
    assert (made.plan.world_size, made.plan.first_group.precision) == (2, Precision.BF16)
    groups = tuple(replace(group, precision=Precision.FP16) for group in made.plan.stages[0].groups)
    other = replace(made.plan, stages=(replace(made.plan.stages[0], groups=groups), *made.plan.stages[1:]))
    (problem,) = search.check(replace(made, plan=other), scopes=frozenset({search.Scope.JOB}))
    assert "fp16 is not the job's bf16" in problem.what
