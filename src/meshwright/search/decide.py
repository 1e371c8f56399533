"""The decision: the space explored, plans that fit ranked, the best refined, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright import cost
from meshwright.cost import Layout, PlanTable
from meshwright.search.arrangements import Arrangement, arrangements, placed
from meshwright.search.candidate import Candidate, Decision, candidate
from meshwright.search.check import check
from meshwright.search.constraints import keeps_constraints
from meshwright.search.explain import compared, rejected_for_memory, why
from meshwright.search.explore import LEAST_LIKELY, Explorer
from meshwright.search.job_rules import allowed_precisions, check_job
from meshwright.search.lighten import lightened
from meshwright.search.misses import nothing_fits, nothing_legal
from meshwright.search.orders import WORTH, reorder
from meshwright.search.pareto import pareto
from meshwright.search.product import Rejection
from meshwright.search.rules import Scope
from meshwright.search.space import Space, enumerate_plans
from meshwright.search.stages import balanced_stages
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import NoPlanFits
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Report

SLACK = 1.02  # over the best scores, below which plans are priced: closed forms may be as much too short
MOST = 3  # times as many plans as are asked for are laid out again at the most
WEIGHED = 1_000_000  # plans weighed again where those laid out again turn out slower than they promised
FRONT = 8  # plans of the front that are shown
REACH = 2.0  # how much slower than the fastest a plan of the front may be
Entry = tuple[Design, Report]
RUNTIME = frozenset({Scope.RUNTIME})


def design(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, top: int = 10, trainable: bool = False) -> Decision:
    """The best plan for `job.objective` among all legal ones that fit, with the `top` best in order.

    Plans are priced in the order of what they can reach at best until no other can be better; the best are laid out
    again with block times of their own and priced one by one. `trainable` leaves out what this runtime cannot train.
    Raises ConfigError when the job or its constraints are wrong, NoPlanFits with the closest miss when no legal plan
    fits or none is legal.
    """
    started = time.perf_counter()
    found = [
        (each, explored(model, each.cluster, job, trainable=trainable, count=top))
        for each in arrangements(cluster, job)
    ]
    tried = [_tried(each, one, top, trainable=trainable) for each, one in found if one.fitting]
    if not tried:
        listed = found[0][1]
        if not listed.space.count:
            raise NoPlanFits(nothing_legal(model, cluster, job, listed.space, listed=legal_space))
        raise NoPlanFits(nothing_fits(model, cluster, job, listed, explored=explored))
    kept = _worthwhile(tried, job.objective)
    best = min(kept, key=lambda entry: _order(entry.refined[0], job.objective))
    refined = sorted(
        (entry for each in kept for entry in each.placed(each.refined, cluster)),
        key=lambda entry: _order(entry, job.objective),
    )
    chosen, report = refined[0]
    return Decision(
        design=chosen,
        report=report,
        ranked=tuple(candidate(entry.plan, figures) for entry, figures in refined[:top]),
        rejected=best.rejected,
        why=(*why(*best.refined[0], best.found), *_why_placed(best, tried[0])),
        front=_joint([each.placed(front(each.found), cluster) for each in kept]),
        considered=sum(one.space.count for _, one in found),
        priced=sum(one.priced for _, one in found),
        fitting=sum(one.fitting for _, one in found),
        seconds=time.perf_counter() - started,
        predicts_only=check(chosen, scopes=RUNTIME),
        refined=len(refined),
        settled=all(each.settled for each in kept),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What the search found with the machines in one order: the best laid out again, and whether no other is."""

    arrangement: Arrangement
    found: Explorer
    refined: list[Entry]
    settled: bool

    def placed(self, entries: Sequence[Entry], cluster: ClusterSpec) -> list[Entry]:
        """`entries` on the devices of `cluster` as it is listed."""
        found = (placed(entry, self.arrangement, cluster) for entry in entries)
        return [entry for entry in found if entry is not None]

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        found = self.found
        memory = rejected_for_memory(found.table, found.prices, hopeless=found.hopeless)
        return (*memory, *found.space.rejected)


def _tried(arrangement: Arrangement, found: Explorer, top: int, *, trainable: bool) -> _Tried:
    reorder(found, top, trainable=trainable)
    refined, settled = best_refined(found, top)
    return _Tried(arrangement=arrangement, found=found, refined=refined, settled=settled)


def _worthwhile(tried: Sequence[_Tried], objective: Objective) -> list[_Tried]:
    """The first, and those whose best plan is better by WORTH: machines stay as they are listed for less."""
    limit = _value(tried[0].refined[0], objective) * (1.0 - WORTH)
    return [tried[0], *(each for each in tried[1:] if _value(each.refined[0], objective) < limit)]


def _why_placed(best: _Tried, listed: _Tried) -> tuple[str, ...]:
    """What the machines as they are listed would cost, where the ranks are placed on them in another order."""
    if best.arrangement.is_listed:
        return ()
    names = ", ".join(group.name for group in best.arrangement.cluster.groups)
    if not listed.arrangement.is_listed:
        return (f"machines in the order {names}: with those of the cluster as they are listed no plan fits",)
    head = f"machines as they are listed instead of in the order {names}"
    return (compared(*best.refined[0], *listed.refined[0], head=head),)


def best_refined(found: Explorer, count: int) -> tuple[list[Entry], bool]:
    """Plans laid out again, best first, and whether no other can be among the `count` best.

    Plans are taken in the order of their scores until the next promises no more than the `count` best reach; a score
    is less than what a plan reaches, but for closed forms that are too long and stages that balance better. At most
    MOST times `count` are.
    """
    model, cluster, job = found.model, found.cluster, found.job
    done: dict[int, Entry] = {}
    limit, settled = float("inf"), True
    while len(done) <= MOST * count:
        rows = _next(found, done, limit, most=max(count - len(done), 1))
        if not rows and len(done) >= count and limit > found.settled:
            settled = found.until(partial(float, limit), most=WEIGHED)
            rows = _next(found, done, limit, most=1)
        if not rows or len(done) == MOST * count:
            settled = settled and not rows
            break
        done |= zip(rows, refine(found.table, rows, model=model, cluster=cluster, job=job), strict=True)
        values = sorted(_value(entry, job.objective) for entry in done.values())
        limit = values[count - 1] if len(values) >= count else limit
    return sorted(done.values(), key=lambda entry: _order(entry, job.objective)), settled


def _next(found: Explorer, done: Mapping[int, object], limit: float, *, most: int) -> list[int]:
    """The rows with the best scores below `limit` that are not `done`, best first, at most so many."""
    score = np.where(found.prices.fits, found.scores(), np.inf)
    score[list(done)] = np.inf
    best = np.argsort(score, kind="stable")[:most]
    return [int(row) for row in best if score[row] < limit]


def explored(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, trainable: bool = False, count: int = 10
) -> Explorer:
    """The space of the job, with at least its `count` best plans that fit priced."""
    space = legal_space(model, cluster, job, trainable=trainable)
    found = Explorer(space, model=model, cluster=cluster, job=job)
    if space.count:
        found.best(count, slack=SLACK)
    return found


def legal_space(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, trainable: bool = False) -> Space:
    """Every legal plan, with stages balanced by the cost model's block times; nothing is priced."""
    check_job(model, cluster, job)
    boundaries = {kind: balanced_stages(model, cluster, job, precision=kind) for kind in allowed_precisions(job)}
    return enumerate_plans(model, cluster, job, boundaries=boundaries, trainable=trainable)


def refine(
    table: PlanTable, rows: Sequence[int], *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> list[Entry]:
    """The designs of `rows` and their reports.

    A pipelined row is also tried with stages balanced for its own tensor degree and microbatch, and one that computes
    layers again with fewer of them; the best that fits is kept, so that refining never makes a plan worse.
    """
    balanced = (_rebalanced(table, row, model=model, cluster=cluster, job=job) for row in rows)
    others = {row: other for row, other in zip(rows, balanced, strict=True) if other is not None}
    plain = [table.take([row]) for row in rows]
    tried = _priced([*plain, *others.values()], model=model, cluster=cluster, job=job)
    best = dict(zip(rows, tried, strict=False))
    order = partial(_order, objective=job.objective)
    for row, other in zip(others, tried[len(plain) :], strict=True):
        best[row] = min(best[row], other, key=order)
    for row, entry in best.items():
        lighter = (other for other in lightened(entry[0]) if keeps_constraints(other[0]) is None)
        best[row] = min([entry, *lighter], key=order)
    return list(best.values())


def front(found: Explorer) -> list[Entry]:
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
    return _priced(
        [table.take([row]) for row in picked.tolist()], model=found.model, cluster=found.cluster, job=found.job
    )


def _joint(fronts: Sequence[Sequence[Entry]]) -> tuple[Candidate, ...]:
    """Of fronts of machines in several orders what none of them beats, the fastest first."""
    found = [candidate(made.plan, report) for entries in fronts for made, report in entries]
    if len(fronts) == 1:
        return tuple(found)
    upper = np.array([entry.step_seconds * entry.error_band[1] for entry in found])
    held = np.array([entry.peak_bytes for entry in found])
    mask = pareto(upper, held, np.array([float(entry.plan.world_size) for entry in found]))
    return tuple(found[row] for row in np.argsort(upper, kind="stable") if mask[row])[:FRONT]


def _order(entry: Entry, objective: Objective) -> tuple[bool, float, float]:
    """Plans that fit come first, then what the objective minimises."""
    plan, report = entry[0].plan, entry[1]
    return not report.fits, minimised(plan, report, objective), report.step_seconds * report.error_band[1]


def minimised(plan: Plan, report: Report, objective: Objective) -> float:
    """What the best plan has least of: seconds of a step, device-seconds or bytes.

    Time and cost are at the cautious end of their interval, over the probability of fitting: a plan that fits half the
    time is tried, and given up, as often as it runs.
    """
    upper = report.step_seconds * report.error_band[1]
    expected = upper / max(1.0 if report.fit_probability is None else report.fit_probability, LEAST_LIKELY)
    return {
        Objective.TIME: expected,
        Objective.COST: expected * plan.world_size,
        Objective.MEMORY: report.peak_bytes,
    }[objective]


def _value(entry: Entry, objective: Objective) -> float:
    """What the objective minimises; infinite where the plan does not fit."""
    misses, value, _ = _order(entry, objective)
    return float("inf") if misses else value


def _priced(tables: Sequence[PlanTable], *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> list[Entry]:
    """The designs of tables of one row each, with their reports."""
    plans = [
        one.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length) for one in tables
    ]
    designs = [Design(model=model, cluster=cluster, job=job, plan=plan) for plan in plans]
    return list(zip(designs, cost.predict_all(designs), strict=True))


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
