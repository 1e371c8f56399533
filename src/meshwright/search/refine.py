"""Plans laid out again one by one: stages balanced for each, and no more recompute than it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from meshwright import cost
from meshwright.cost import Layout, PlanTable
from meshwright.search.candidate import expected_seconds
from meshwright.search.constraints import Value, keeps_constraints
from meshwright.search.lighten import lightened
from meshwright.search.stages import balanced_stages
from meshwright.search.trainer import Held
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
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
    fixed: Sequence[Mapping[str, Value]] = (),
    within: float = float("inf"),
) -> list[Entry]:
    """The designs of `rows` and their reports.

    A pipelined row is also tried with stages balanced for its own tensor degree and microbatch, and one that computes
    layers again with fewer of them; the best that fits is kept, so that refining never makes a plan worse. What the
    trainer of `held` has no words for is not tried, nor what differs from the settings that are `fixed` of a row; what
    takes longer than `within` seconds is worse than what does not.
    """

    def said(entry: Entry) -> bool:
        return held is None or held.says(entry[0])

    plain = [table.take([row]) for row in rows]
    balanced = [_rebalanced(one, model=model, cluster=cluster, job=job) for one in plain]
    others = {index: other for index, other in enumerate(balanced) if other is not None}
    tried = priced([*plain, *others.values()], model=model, cluster=cluster, job=job)
    best, order = tried[: len(plain)], partial(entry_order, objective=job.objective, within=within)
    for index, other in zip(others, tried[len(plain) :], strict=True):
        best[index] = min(best[index], other, key=order) if said(other) else best[index]
    for index, less in enumerate(lightened([made for made, _ in best])):
        settings = fixed[index] if fixed else {}
        lighter = (other for other in less if _keeps(other[0], settings) and said(other))
        best[index] = min([best[index], *lighter], key=order)
    return best


def distinct(entries: Sequence[Entry]) -> list[Entry]:
    """`entries` without those whose plan stands among them already: two rows may become one plan."""
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(entry[0].plan.digest(), entry)
    return list(found.values())


def _keeps(made: Design, fixed: Mapping[str, Value]) -> bool:
    """Whether all blocks keep the job's constraints and the settings `fixed` besides."""
    constraints = replace(made.job.constraints, fix={**made.job.constraints.fix, **fixed})
    return keeps_constraints(replace(made, job=replace(made.job, constraints=constraints))) is None


def priced(tables: Sequence[PlanTable], *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> list[Entry]:
    """The designs of tables of one row each, with their reports; the steps of learners' rounds are found anew."""
    tables = _with_rounds(tables, model=model, cluster=cluster, job=job)
    plans = [
        one.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length) for one in tables
    ]
    designs = [Design(model=model, cluster=cluster, job=job, plan=plan) for plan in plans]
    return list(zip(designs, cost.predict_all(designs), strict=True))


def _with_rounds(
    tables: Sequence[PlanTable], *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> Sequence[PlanTable]:
    """`tables` with rounds of as many steps as the job asks for, or as few as hide the network."""
    if not any((one.learners > 1).any() for one in tables):
        return tables
    stacked = PlanTable.stacked(tables)
    open_ = replace(stacked, every=np.where(stacked.learners > 1, job.synchronize.every, 0))
    every = cost.evaluate(open_, model=model, cluster=cluster, job=job, every_rank=True).every
    return [replace(one, every=every[row : row + 1]) for row, one in enumerate(tables)]


def entry_order(entry: Entry, objective: Objective, within: float = float("inf")) -> tuple[bool, float, float]:
    """Plans that fit and take no longer than `within` seconds, as they are expected, come first; then what the
    objective minimises."""
    design, report = entry
    misses = not report.fits or expected_seconds(design, report) > within
    return misses, minimised(design, report, objective), report.step_seconds * report.error_band[1]


def entry_value(entry: Entry, objective: Objective, within: float = float("inf")) -> float:
    """What the objective minimises; infinite where the plan does not fit or takes longer than `within` seconds."""
    misses, value, _ = entry_order(entry, objective, within)
    return float("inf") if misses else value


def minimised(design: Design, report: Report, objective: Objective) -> float:
    """What the best plan has least of: seconds of a step, device-seconds or bytes."""
    expected = expected_seconds(design, report)
    return {
        Objective.TIME: expected,
        Objective.COST: expected * design.plan.world_size,
        Objective.MEMORY: report.peak_bytes,
    }[objective]


def _rebalanced(one: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> PlanTable | None:
    """The one row with stages balanced for itself; None where those are the stages that it has."""
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
    ranks = tuple(stage.rank for stage in plan.stages)
    layout = Layout(bounds=tuple(boundaries(plan.pipeline, ranks, plan.world_size)), ranks=ranks)
    if layout == one.layouts[int(one.layout[0])]:
        return None
    return replace(one, layout=np.zeros_like(one.layout), layouts=(layout,))
