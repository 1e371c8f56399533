"""The closest miss: what to change when no plan is legal or none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.table import column_names
from meshwright.search.batches import Listed, batch_problem
from meshwright.search.check import check
from meshwright.search.constraints import COLUMNS, columns_of, limits
from meshwright.search.explain import row_words
from meshwright.search.explore import Explorer
from meshwright.search.prices import Prices
from meshwright.search.probe import broken_rules
from meshwright.search.rules import Scope, choices
from meshwright.search.space import Space
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import Problem
from meshwright.spec.job import Constraints, Devices, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from meshwright.spec.units import counted, format_bytes, format_percent

Explored = Callable[[ModelSpec, ClusterSpec, JobSpec], Explorer]
GROWTH = (2, 4, 8, 16, 32, 64)
SHOWN_RULES = 4
# Columns of constraints that a table of plans has itself; a value of another is made of several of its columns.
_OWN_COLUMNS = frozenset({*COLUMNS} & {*column_names()} - {"expert_tensor", "sync"})


def nothing_legal(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, space: Space, *, listed: Listed
) -> tuple[Problem, ...]:
    """Why no plan is legal: a batch that all devices cannot share, each constraint that would allow a plan if it were
    dropped, or the rules that refused. `listed` gives the legal plans of a job; none is priced.
    """
    batch = batch_problem(model, cluster, job, space, listed=listed)
    found = [] if batch is None else [batch]
    for where, relaxed in _relaxations(job.constraints):
        if batch is not None and relaxed.devices != job.constraints.devices:
            continue
        other = listed(model, cluster, replace(job, constraints=relaxed))
        if not other.count:
            continue
        column = where.rsplit(".", maxsplit=1)[-1]
        some = _some_plans(other, model, cluster, job, unlike=column)
        first = next(some)
        legal = _legal_values((first, *some), column) if column in job.constraints.fix else []
        what = f"{job.constraints.fix[column]} leaves no legal plan" if legal else "leaves no legal plan"
        fix = choices(legal) if legal else f"without it {other.count:,} plans are legal"
        near = Design(model=model, cluster=cluster, job=job, plan=first)
        found.append(Problem(where=where, what=what, why=_broken(near) or _refusals(space), fix=fix))
    if found:
        return tuple(found)
    what = f"no plan of {model.name} on {counted(cluster.num_devices, 'device')} of {cluster.name} is legal"
    fix = "choose a batch that more data parallel sizes divide, another number of devices, or fewer constraints"
    return (Problem(what=what, why=_refusals(space), fix=fix),)


def nothing_fits(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, found: Explorer, *, explored: Explored
) -> tuple[Problem, ...]:
    """The legal plan that misses by least, and what would make a plan fit: a constraint dropped, or more devices."""
    row, costs = _closest(found.prices), found.prices
    words = row_words(found.table, row)
    what = f"no plan of {found.space.count:,} fits; the closest ({words}) {costs.need(row)}"
    closer = [
        (where, relaxed)
        for where, relaxed in _relaxed(model, cluster, job, explored)
        if relaxed.prices.fits.any() or relaxed.prices.filled[_closest(relaxed.prices)] < costs.filled[row]
    ]
    fixes = [f"without {where} {_least_need(relaxed)}" for where, relaxed in closer]
    if not any(relaxed.prices.fits.any() for _, relaxed in closer):
        fixes.append(_more_devices(model, cluster, job, explored))
    return (Problem(where="memory", what=what, why="rule memory-fits", fix="; ".join(fixes)),)


def _relaxed(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, explored: Explored
) -> Iterable[tuple[str, Explorer]]:
    for where, relaxed in _relaxations(job.constraints):
        found = explored(model, cluster, replace(job, constraints=relaxed))
        if found.priced:
            yield where, found


def _relaxations(constraints: Constraints) -> Iterable[tuple[str, Constraints]]:
    """Each constraint by its place, and the constraints without it."""
    for name in constraints.fix:
        rest = {key: value for key, value in constraints.fix.items() if key != name}
        yield f"job.constraints.fix.{name}", replace(constraints, fix=rest)
    for index in range(len(constraints.forbid)):
        kept = constraints.forbid[:index] + constraints.forbid[index + 1 :]
        yield f"job.constraints.forbid[{index}]", replace(constraints, forbid=kept)
    if len(constraints.fix) + len(constraints.forbid) > 1:
        yield "job.constraints fix and forbid", replace(constraints, fix={}, forbid=())
    if constraints.devices == Devices.ALL:
        yield "job.constraints.devices = all", replace(constraints, devices=Devices.ANY)


def _some_plans(space: Space, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, unlike: str) -> Iterator[Plan]:
    """At most a few thousand plans of a space that has any, from all of it, the first of each value in a column."""
    frames = np.flatnonzero(space.sizes)
    table = space.rows_of(frames[:: max(1, len(frames) // 200)])
    rows = np.arange(0, len(table), max(1, len(table) // 2000))
    if unlike in _OWN_COLUMNS:
        rows = np.sort(rows[np.unique(getattr(table, unlike)[rows], return_index=True)[1]])
    for row in rows.tolist():
        yield table.to_plan(row, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length)


def _legal_values(plans: Iterable[Plan], column: str) -> list[object]:
    return sorted({columns_of(plan)[column] for plan in plans}, key=lambda value: (str(type(value)), value))


def _broken(near: Design) -> str:
    """`3 does not divide 8 heads, rule tensor-divides-heads`: the rules that a plan near `near` with what its job fixes
    breaks; empty where it breaks none."""
    fixed = limits(near.job.constraints).fixed
    broken = broken_rules(fixed, near) if fixed else ()
    return "; ".join(f"{problem.what}, {problem.why}" for problem in broken)


def _refusals(space: Space) -> str:
    """`tensor-divides-heads refused tensor 3; ...`: the rules that refused, each with an example."""
    shown = [f"{entry.rule} refused {entry.count:,}, as {entry.example}" for entry in space.rejected[:SHOWN_RULES]]
    return "; ".join(shown)


def _closest(costs: Prices) -> int:
    return int(np.argmin(np.where(costs.finite, costs.filled, np.inf)))


def _least_need(found: Explorer) -> str:
    costs = found.prices
    row = _closest(costs)
    verdict = "and fits" if costs.fits.any() else "and still does not fit"
    beside = "" if not costs.host_missing[row] else ", and more of the host's memory than its share,"
    need = f"{format_bytes(float(costs.memory_bytes[row]))}{beside}"
    return f"{row_words(found.table, row)} would need {need} {verdict}"


def _more_devices(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, explored: Explored) -> str:
    """How many times the machines it takes until something fits, by doubling, with all that makes the plan that is best
    there fit, its chance, and whether it is one to predict alone."""
    for times in GROWTH:
        groups = tuple(replace(group, num_nodes=group.num_nodes * times) for group in cluster.groups)
        larger = replace(cluster, groups=groups)
        found = explored(model, larger, job)
        if found.priced and found.prices.fits.any():
            costs = found.prices
            row = int(np.argmin(np.where(costs.fits & costs.finite, found.scores(), np.inf)))
            told = [row_words(found.table, row), f"fits with {format_percent(float(costs.fit_probability[row]))}"]
            told += ["can be predicted and not trained yet"] if _is_only_predicted(found, row) else []
            return f"{larger.num_devices:,} such devices would fit ({'; '.join(told)})"
    return f"no {GROWTH[-1]} times as many such devices would fit: choose devices with more memory or a smaller model"


def _is_only_predicted(found: Explorer, row: int) -> bool:
    """Whether this runtime cannot train the plan of a row yet; no plan that is held to another trainer is."""
    if found.held.trainer is not None:
        return False
    length = found.job.sequence_length
    plan = found.table.to_plan(row, model=found.model.name, cluster=found.cluster.name, sequence_length=length)
    made = Design(model=found.model, cluster=found.cluster, job=found.job, plan=plan)
    return bool(check(made, scopes=frozenset({Scope.RUNTIME})))
