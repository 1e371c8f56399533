"""The decision: the space explored, plans that fit ranked, the best refined, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from meshwright import cost
from meshwright.cost import Layout, PlanTable
from meshwright.cost.table import column_names
from meshwright.search.candidate import ORDERED_BY, Candidate, Decision, candidate, expected_seconds
from meshwright.search.check import check
from meshwright.search.constraints import Value, keeps_constraints, limits
from meshwright.search.explain import rejected_for_memory, why
from meshwright.search.explore import Explorer
from meshwright.search.job_rules import check_job
from meshwright.search.lighten import lightened
from meshwright.search.misses import nothing_fits, nothing_legal
from meshwright.search.pareto import pareto
from meshwright.search.rules import Scope
from meshwright.search.space import Space, enumerate_plans
from meshwright.search.stages import balanced_stages
from meshwright.search.trainer import Held, Trainer
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import NoPlanFits
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Report

SLACK = 1.02  # over the best scores, below which plans are priced: closed forms may be as much too short
RANKED = 10  # plans that are ranked unless more are asked for: of fewer, as many are laid out again
MOST = 3  # times as many plans as are asked for are laid out again at the most
WEIGHED = 1_000_000  # plans weighed again where those laid out again turn out slower than they promised
FRONT = 8  # plans of the front that are shown
REACH = 2.0  # how much slower than the fastest a plan of the front may be
RUNTIME = frozenset({Scope.RUNTIME})
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best plan of a question, and what it costs."""

    design: Design
    report: Report


def design(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    top: int = 10,
    trainable: bool = False,
    trainer: Trainer | None = None,
) -> Decision:
    """The best plan for `job.objective` among all legal ones that fit, with the `top` best in order.

    Plans are priced in the order of what they can reach at best until no other can be better; the best are laid out
    again with block times of their own and priced one by one. `trainable` leaves out what this runtime cannot train,
    `trainer` what another one has no words for. Raises ConfigError when the job or its constraints are wrong,
    NoPlanFits with the closest miss when no legal plan fits or none is legal.
    """
    started = time.perf_counter()
    found = explored(model, cluster, job, trainable=trainable, trainer=trainer, count=top)
    _check_found(found)
    refined, settled = best_refined(found, top, most=MOST * max(top, RANKED))
    chosen, report = refined[0]
    reasons = why(chosen, report, found, laid_out=partial(best_of, found))
    costs = found.prices
    return Decision(
        design=chosen,
        report=report,
        ranked=tuple(candidate(entry.plan, figures) for entry, figures in refined[:top]),
        rejected=(
            *rejected_for_memory(found.table, costs, hopeless=found.hopeless),
            *found.held.rejected,
            *found.space.rejected,
        ),
        why=reasons,
        front=front(found, model=model, cluster=cluster, job=job),
        considered=found.space.count,
        priced=found.priced,
        fitting=int(np.count_nonzero(costs.fits & costs.finite)),
        seconds=time.perf_counter() - started,
        predicts_only=check(chosen, scopes=RUNTIME),
        ordered_by=ORDERED_BY[job.objective],
        trainer=None if trainer is None else trainer.name,
        refined=len(refined),
        settled=settled,
    )


def best(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, trainer: Trainer | None = None) -> Best:
    """The best plan alone, as `design` finds it, without the reasons and the others. Raises as `design` does."""
    found = explored(model, cluster, job, trainer=trainer, count=1)
    _check_found(found)
    refined, _ = best_refined(found, 1, most=MOST * RANKED)
    made, report = refined[0]
    return Best(design=made, report=report)


def _check_found(found: Explorer) -> None:
    """Raises NoPlanFits, with the closest miss, where no plan is legal, or can be said, or none fits."""
    asked = found.model, found.cluster, found.job
    if not found.space.count:
        raise NoPlanFits(nothing_legal(*asked, found.space, listed=legal_space))
    if not found.priced:
        raise NoPlanFits(found.held.nothing_left())
    if not (found.prices.fits & found.prices.finite).any():
        raise NoPlanFits(nothing_fits(*asked, found, explored=partial(explored, trainer=found.held.trainer)))


def best_of(found: Explorer, rows: Ids, held: Mapping[str, Value]) -> tuple[Design, Report]:
    """The best of `rows` laid out again with the settings `held`, whose stages may be others: taken in the order of
    their scores until the next promises no more, RANKED at the most."""
    constraints = replace(found.job.constraints, fix={**found.job.constraints.fix, **held})
    job, scores = replace(found.job, constraints=constraints), found.scores()[rows]
    done: list[tuple[Design, Report]] = []
    for at in np.argsort(scores, kind="stable")[:RANKED]:
        if done and scores[at] >= min(_value(entry, job.objective) for entry in done):
            break
        done += refine(found.table, [int(rows[at])], model=found.model, cluster=found.cluster, job=job, held=found.held)
    made, report = min(done, key=lambda entry: _order(entry, job.objective))
    return replace(made, job=found.job), report


def best_refined(found: Explorer, count: int, *, most: int | None = None) -> tuple[list[tuple[Design, Report]], bool]:
    """Plans laid out again, best first, and whether no other can be among the `count` best.

    Plans are taken in the order of their scores until the next promises no more than the `count` best reach; a score
    is less than what a plan reaches, but for closed forms that are too long and stages that balance better. At most
    `most` are, MOST times `count` unless that is said.
    """
    most = MOST * count if most is None else most
    model, cluster, job = found.model, found.cluster, found.job
    done: dict[int, tuple[Design, Report]] = {}
    limit, settled = float("inf"), True
    while len(done) <= most:
        row = _next(found, done, limit)
        if row is None and len(done) >= count and limit > found.settled:
            settled = found.until(partial(float, limit), most=WEIGHED)
            row = _next(found, done, limit)
        if row is None or len(done) == most:
            settled = settled and row is None
            break
        (done[row],) = refine(found.table, [row], model=model, cluster=cluster, job=job, held=found.held)
        values = sorted(_value(entry, job.objective) for entry in done.values())
        limit = values[count - 1] if len(values) >= count else limit
    return sorted(done.values(), key=lambda entry: _order(entry, job.objective)), settled


def _next(found: Explorer, done: Mapping[int, object], limit: float) -> int | None:
    """The row with the best score below `limit` that is not `done`; None where there is none."""
    score = np.where(found.prices.fits, found.scores(), np.inf)
    score[list(done)] = np.inf
    row = int(np.argmin(score))
    return row if score[row] < limit else None


def explored(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    trainable: bool = False,
    trainer: Trainer | None = None,
    count: int = 10,
) -> Explorer:
    """The space of the job, with at least its `count` best plans that fit priced."""
    space = legal_space(model, cluster, job, trainable=trainable, trainer=trainer)
    found = Explorer(space, model=model, cluster=cluster, job=job, trainer=trainer)
    if space.count and (refused := found.held.whatever_the_plan(space.lightest.rows_of(np.zeros(1, dtype=np.int64)))):
        raise NoPlanFits(refused)
    if space.count:
        found.best(count, slack=SLACK)
    return found


def legal_space(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, trainable: bool = False, trainer: Trainer | None = None
) -> Space:
    """Every legal plan, with stages balanced by the cost model's block times, or as `trainer` divides the model itself;
    nothing is priced."""
    precision = Precision(str(limits(job.constraints).fixed.get("precision", job.precision.value)))
    check_job(model, cluster, job, precision=precision)
    balanced = balanced_stages(model, cluster, job, precision=precision)

    def boundaries(pipeline: int, chunks: int) -> Sequence[int]:
        dealt = trainer.stages(model, pipeline) if trainer is not None and chunks == 1 else None
        return balanced(pipeline, chunks) if dealt is None else (*dealt, len(model.blocks))

    return enumerate_plans(model, cluster, job, boundaries=boundaries, trainable=trainable)


def refine(
    table: PlanTable,
    rows: Sequence[int],
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    held: Held | None = None,
) -> list[tuple[Design, Report]]:
    """The designs of `rows` and their reports, best first.

    A pipelined row is also tried with stages balanced for its own tensor degree and microbatch, and one that computes
    layers again with fewer of them; the best that fits is kept, so that refining never makes a plan worse. What the
    trainer of `held` has no words for is not tried.
    """

    def allowed(entry: tuple[Design, Report]) -> bool:
        return keeps_constraints(entry[0]) is None and (held is None or held.says(entry[0]))

    found = []
    for row in rows:
        one = table.take([row])
        tried = [_priced(one, model=model, cluster=cluster, job=job)]
        if int(one.pipeline[0]) > 1:
            rebalanced = _rebalanced(one, model=model, cluster=cluster, job=job)
            if rebalanced.layouts[0] != one.layouts[int(one.layout[0])]:
                other = _priced(rebalanced, model=model, cluster=cluster, job=job)
                tried += [other] if held is None or held.says(other[0]) else []
        best = min(tried, key=lambda entry: _order(entry, job.objective))
        lighter = (entry for entry in lightened(best[0]) if allowed(entry))
        found.append(min([best, *lighter], key=lambda entry: _order(entry, job.objective)))
    return sorted(found, key=lambda entry: _order(entry, job.objective))


def front(found: Explorer, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> tuple[Candidate, ...]:
    """Plans among those priced that none beats in time, memory and devices at once, the fastest first, at most FRONT.

    Price and energy are devices times time, so that a plan that is least in either is among them. Of many, those that
    lie evenly between the fastest and the one that holds least.
    """
    table, prices = found.table, found.prices
    near = prices.upper_seconds <= REACH * float(np.min(prices.upper_seconds[prices.fits & prices.finite]))
    usable = prices.fits & prices.finite & near
    mask = pareto(prices.upper_seconds, prices.memory_bytes, table.world.astype(np.float64), usable=usable)
    rows = np.flatnonzero(mask)
    rows = rows[np.lexsort((prices.memory_bytes[rows], prices.upper_seconds[rows]))]
    picked = rows[np.unique(np.linspace(0, len(rows) - 1, min(FRONT, len(rows))).round().astype(np.int64))]
    priced = (_priced(table.take([int(row)]), model=model, cluster=cluster, job=job) for row in picked)
    return tuple(candidate(made.plan, report) for made, report in priced)


def _order(entry: tuple[Design, Report], objective: Objective) -> tuple[bool, float, float]:
    """Plans that fit come first, then what the objective minimises."""
    plan, report = entry[0].plan, entry[1]
    return not report.fits, minimised(plan, report, objective), report.step_seconds * report.error_band[1]


def minimised(plan: Plan, report: Report, objective: Objective) -> float:
    """What the best plan has least of: seconds of a step, device-seconds or bytes."""
    expected = expected_seconds(report)
    return {
        Objective.TIME: expected,
        Objective.COST: expected * plan.world_size,
        Objective.MEMORY: report.peak_bytes,
    }[objective]


def _value(entry: tuple[Design, Report], objective: Objective) -> float:
    """What the objective minimises; infinite where the plan does not fit."""
    misses, value, _ = _order(entry, objective)
    return float("inf") if misses else value


def _priced(one: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> tuple[Design, Report]:
    plan = one.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length)
    made = Design(model=model, cluster=cluster, job=job, plan=plan)
    return made, cost.predict(made)


def _rebalanced(one: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> PlanTable:
    plan = one.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length)
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
    columns = {name: getattr(one, name) for name in column_names() if name != "layout"}
    return PlanTable.build(columns, layouts=(layout,), orders=one.orders)
