"""Why the best plan is best: against the best plan that differs in one dimension, and which line makes the gap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.table import RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.search.prices import Prices
from meshwright.search.space import Rejection, Space
from meshwright.spec.job import Objective
from meshwright.spec.plan import Design, Recompute, Sharding
from meshwright.spec.report import LineName, Report, diff
from meshwright.spec.units import format_bytes, format_percent

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
DIMENSIONS = ("tensor", "pipeline", "shard", "sharding", "microbatch", "recompute", "schedule", "sequence_parallel")
CLOSE = 0.0005


def why(chosen: Design, report: Report, table: PlanTable, score: Floats, *, fits: Mask) -> tuple[str, ...]:
    """One line for every dimension: what the best plan with another value of it would cost, and where.

    `score` is what the objective minimises, `fits` says which rows may be chosen. Alternatives are free in every
    other dimension, so that a line says what the dimension is worth and not what one careless change would do.
    """
    lines: list[str] = []
    best = float(np.min(score[fits]))
    own = {name: _value_of(chosen, name) for name in DIMENSIONS}
    told: set[int] = set()
    for name in DIMENSIONS:
        column = getattr(table, name)
        others = np.where((column != own[name]) & fits, score, np.inf)
        if len(np.unique(column)) == 1:
            continue
        row = int(np.argmin(others))
        if not np.isfinite(others[row]):
            tried = " or ".join(_word(name, int(value)) for value in np.unique(column) if value != own[name])
            lines.append(f"{_word(name, own[name])}: no plan with {tried} fits")
            continue
        if row in told:
            continue
        told.add(row)
        line = _against(chosen, report, table, row, name=name, own=own[name])
        alike = (column == column[row]) & ~fits
        missed = float(np.min(score[alike], initial=np.inf)) < best
        lines.append(f"{line}; one that does not fit would be better than this plan" if missed else line)
    return tuple(lines)


def _against(chosen: Design, report: Report, table: PlanTable, row: int, *, name: str, own: int) -> str:
    plan = table.to_plan(
        row, model=chosen.model.name, cluster=chosen.cluster.name, sequence_length=chosen.job.sequence_length
    )
    other = cost.predict(Design(model=chosen.model, cluster=chosen.cluster, job=chosen.job, plan=plan))
    theirs = int(getattr(table, name)[row])
    head = f"{_word(name, theirs)} instead of {_word(name, own, bare=True)}"
    rest = _changes(chosen, table, row, name)
    if chosen.job.objective is Objective.MEMORY:
        return f"{head} would need {format_bytes(other.peak_bytes)}, not {format_bytes(report.peak_bytes)}{rest}"
    ours, cost_of = report.step_seconds, other.step_seconds
    if chosen.job.objective is Objective.COST:
        ours, cost_of = ours * chosen.plan.world_size, cost_of * plan.world_size
    change = cost_of / ours - 1.0
    if abs(change) < CLOSE:
        return f"{head} would take as long{rest}"
    noun = "money" if chosen.job.objective is Objective.COST else "time"
    verb = f"would take {format_percent(abs(change))} {'more' if change > 0 else 'less'} {noun}"
    return f"{head} {verb}{rest}: {_cause(report, other)}"


def _cause(report: Report, other: Report) -> str:
    """The line that grows most from `report` to `other`, and what it grows from and to as shares of the step."""
    gaps = [gap for gap in diff(report, other)[1:] if gap.name != LineName.STEP]
    worst = max(gaps, key=lambda gap: gap.seconds)
    before, after = worst.predicted / report.step_seconds, worst.measured / report.step_seconds
    return f"{worst.name} {format_percent(before)} to {format_percent(after)} of this step"


def _changes(chosen: Design, table: PlanTable, row: int, name: str) -> str:
    """`, with shard 64 and microbatch 2`: what else the alternative changes to be at its best."""
    others = [other for other in DIMENSIONS if other != name]
    changed = [other for other in others if int(getattr(table, other)[row]) != _value_of(chosen, other)]
    words = [_word(other, int(getattr(table, other)[row])) for other in changed[:3]]
    return f" (with {' and '.join(words)})" if words else ""


def rejected_for_memory(space: Space, costs: Prices) -> tuple[Rejection, ...]:
    """How many legal plans do not fit, with the one that misses by least; () when all fit."""
    misses = ~costs.fits & costs.finite
    count = int(np.count_nonzero(misses)) + space.hopeless
    if not count:
        return ()
    if not misses.any():
        example = "parameters and optimizer state alone are more than a device holds"
        return (Rejection(rule="memory-fits", count=count, example=example),)
    row = int(np.argmin(np.where(misses, costs.memory_bytes / costs.capacity, np.inf)))
    need, has = float(costs.memory_bytes[row]), float(costs.capacity[row])
    words = row_words(space.table, row)
    example = f"{words} needs {format_bytes(need - has)} more than the {format_bytes(has)} there are"
    return (Rejection(rule="memory-fits", count=count, example=example),)


def row_words(table: PlanTable, row: int) -> str:
    """`tensor 8, pipeline 4, shard 16, zero1, microbatch 1`: a row without what it does not use."""
    words = [
        _word(name, int(getattr(table, name)[row]))
        for name in ("tensor", "pipeline", "replicate", "shard")
        if int(getattr(table, name)[row]) > 1
    ]
    if table.sharding[row]:
        words.append(SHARDINGS[int(table.sharding[row])].value)
    words += [_word("microbatch", int(table.microbatch[row])), _word("recompute", int(table.recompute[row]))]
    return ", ".join(words)


def _value_of(chosen: Design, name: str) -> int:
    plan, group = chosen.plan, chosen.plan.first_group
    return {
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "shard": plan.shard,
        "sharding": SHARDINGS.index(group.sharding),
        "microbatch": plan.microbatch,
        "recompute": RECOMPUTES.index(group.recompute),
        "schedule": SCHEDULES.index(plan.schedule.kind),
        "sequence_parallel": int(group.sequence_parallel),
    }[name]


def _word(name: str, value: int, *, bare: bool = False) -> str:
    if name == "sharding":
        return "no sharding" if SHARDINGS[value] is Sharding.NONE else SHARDINGS[value].value
    if name == "recompute":
        return "no recompute" if RECOMPUTES[value] is Recompute.NONE else f"{RECOMPUTES[value].value} recompute"
    if name == "schedule":
        return SCHEDULES[value].value
    if name == "sequence_parallel":
        return "sequence parallel" if value else "no sequence parallel"
    return str(value) if bare else f"{name} {value}"
