"""Plans laid out again one by one: stages balanced for each, and no more recompute than it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from meshwright import cost
from meshwright.cost import Layout, PlanTable
from meshwright.search.candidate import expected_seconds
from meshwright.search.constraints import keeps_constraints
from meshwright.search.lighten import lightened
from meshwright.search.stages import balanced_stages
from meshwright.search.trainer import Held
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Report

Entry = tuple[Design, Report]


def refine(
    table: PlanTable,
    rows: Sequence[int],
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    held: Held | None = None,
) -> list[Entry]:
    """The designs of `rows` and their reports.

    A pipelined row is also tried with stages balanced for its own tensor degree and microbatch, and one that computes
    layers again with fewer of them; the best that fits is kept, so that refining never makes a plan worse. What the
    trainer of `held` has no words for is not tried.
    """

    def said(entry: Entry) -> bool:
        return held is None or held.says(entry[0])

    balanced = (_rebalanced(table, row, model=model, cluster=cluster, job=job) for row in rows)
    others = {row: other for row, other in zip(rows, balanced, strict=True) if other is not None}
    plain = [table.take([row]) for row in rows]
    tried = priced([*plain, *others.values()], model=model, cluster=cluster, job=job)
    best = dict(zip(rows, tried, strict=False))
    order = partial(entry_order, objective=job.objective)
    for row, other in zip(others, tried[len(plain) :], strict=True):
        best[row] = min(best[row], other, key=order) if said(other) else best[row]
    for row, entry in best.items():
        lighter = (other for other in lightened(entry[0]) if keeps_constraints(other[0]) is None and said(other))
        best[row] = min([entry, *lighter], key=order)
    return list(best.values())


def priced(tables: Sequence[PlanTable], *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> list[Entry]:
    """The designs of tables of one row each, with their reports."""
    plans = [
        one.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length) for one in tables
    ]
    designs = [Design(model=model, cluster=cluster, job=job, plan=plan) for plan in plans]
    return list(zip(designs, cost.predict_all(designs), strict=True))


def entry_order(entry: Entry, objective: Objective) -> tuple[bool, float, float]:
    """Plans that fit come first, then what the objective minimises."""
    plan, report = entry[0].plan, entry[1]
    return not report.fits, minimised(plan, report, objective), report.step_seconds * report.error_band[1]


def entry_value(entry: Entry, objective: Objective) -> float:
    """What the objective minimises; infinite where the plan does not fit."""
    misses, value, _ = entry_order(entry, objective)
    return float("inf") if misses else value


def minimised(plan: Plan, report: Report, objective: Objective) -> float:
    """What the best plan has least of: seconds of a step, device-seconds or bytes."""
    expected = expected_seconds(report)
    return {
        Objective.TIME: expected,
        Objective.COST: expected * plan.world_size,
        Objective.MEMORY: report.peak_bytes,
    }[objective]


def _rebalanced(
    table: PlanTable, row: int, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> PlanTable | None:
    """The row with stages balanced for itself; None where those are the stages that it has."""
    one = table.take([row])
    plan = one.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length)
    if plan.pipeline == 1:
        return None
    boundaries = balanced_stages(
        model,
        cluster,
        job,
        precision=plan.first_group.precision,
        tensor=plan.tensor,
        microbatch=plan.microbatch,
    )
    layout = Layout(
        bounds=tuple(boundaries(plan.pipeline, plan.schedule.chunks)),
        ranks=tuple(stage.rank for stage in plan.stages),
    )
    if layout == one.layouts[int(one.layout[0])]:
        return None
    return replace(one, layout=np.zeros_like(one.layout), layouts=(layout,))
