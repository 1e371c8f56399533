"""Why the best plan is best: against the best plan that differs in one dimension, and which line makes the gap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.table import OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.search.explore import Explorer
from meshwright.search.ladder import Other
from meshwright.search.prices import Prices
from meshwright.search.product import Rejection
from meshwright.spec.job import Objective
from meshwright.spec.plan import AxisName, Design, Recompute, Sharding
from meshwright.spec.report import LineName, Report, diff
from meshwright.spec.units import format_bytes, format_percent

DIMENSIONS = (
    "precision",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "shard",
    "sharding",
    "microbatch",
    "recompute",
    "offload",
    "schedule",
    "sequence_parallel",
)
CLOSE = 0.0005
MOST = 20_000  # plans weighed for one line: beyond it the line says what it has not seen


def why(chosen: Design, report: Report, found: Explorer) -> tuple[str, ...]:
    """One line for every dimension: what the best plan with another value of it would cost, and where.

    Of precisions, which change the numerics, there is one line for every other that the job allows. Alternatives are
    free in every other dimension, so that a line says what the dimension is worth and not what one careless change
    would do. Frames that may hold a better alternative are priced first.
    """
    lines: list[str | _Other] = []
    own = {name: _value_of(chosen, name) for name in DIMENSIONS}
    told: set[tuple[int, ...]] = set()
    for name, others in _asked(found, own):
        proven = _settle(found, name, others, own=own[name])
        row = _best_other(found, name, others)
        if row is None:
            tried = " or ".join(_word(name, value) for value in others)
            lines.append(f"{_word(name, own[name])}: no plan with {tried} {'fits' if proven else 'was seen to fit'}")
            continue
        table = found.table.take([row])
        key = tuple(int(getattr(table, other)[0]) for other in DIMENSIONS)
        if key not in told:
            told.add(key)
            lines.append(_Other(name=name, own=own[name], row=row))
    designs = [line.design(chosen, found.table) for line in lines if isinstance(line, _Other)]
    priced = iter(zip(designs, cost.predict_all(designs) if designs else (), strict=True))
    told_of = (line if isinstance(line, str) else _line(chosen, report, found, line, *next(priced)) for line in lines)
    return (*told_of, *_order(chosen, report))


def _order(chosen: Design, report: Report) -> Iterator[str]:
    """What the same plan with its axes in the usual order would cost, where they are in another."""
    plan = chosen.plan
    if plan.has_usual_order:
        return
    usual = replace(plan, axes=tuple(sorted(plan.axes, key=lambda axis: list(AxisName).index(axis.name))))
    named = " x ".join(f"{axis.name.value} {axis.size}" for axis in usual.axes if axis.size > 1)
    turned = replace(chosen, plan=usual)
    other = cost.predict(turned)
    yield compared(chosen, report, turned, other, head=f"{named}, the usual order of axes, instead of this one")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """The row of the best plan whose `name` is another than `own`, which is that of the best of all."""

    name: str
    own: int
    row: int

    def design(self, chosen: Design, table: PlanTable) -> Design:
        plan = table.to_plan(
            self.row, model=chosen.model.name, cluster=chosen.cluster.name, sequence_length=chosen.job.sequence_length
        )
        return replace(chosen, plan=plan)


def _values(found: Explorer, name: str) -> list[int]:
    """Every value of a dimension that the space holds."""
    frames = found.space.frames
    if name in frames:
        return [int(value) for value in np.unique(frames[name])]
    return found.space.values(name)


def _asked(found: Explorer, own: Mapping[str, int]) -> Iterator[tuple[str, list[int]]]:
    """Dimensions with the values other than `own` that one line is of."""
    for name in DIMENSIONS:
        others = [value for value in _values(found, name) if value != own[name]]
        if name == "precision":
            yield from ((name, [value]) for value in others)
        elif others and not (name == "offload" and own[name] == 0):
            yield name, others


def _settle(found: Explorer, name: str, others: Sequence[int], *, own: int) -> bool:
    """Prices what may hold a better plan with one of `others`; False where that would be too much."""
    frames = found.space.frames
    among = np.isin(frames[name], others) if name in frames else None

    def best() -> float:
        row = _best_other(found, name, others)
        return float("inf") if row is None else float(found.scores()[row])

    if name not in ("recompute", "offload") and best() <= found.settled:
        return True
    return found.until(best, among=among, other=Other(column=name, value=own), most=MOST)


def _best_other(found: Explorer, name: str, others: Sequence[int]) -> int | None:
    """The best row that fits with one of `others`, values of the dimension; None where none was priced."""
    score = np.where(np.isin(getattr(found.table, name), others) & found.prices.fits, found.scores(), np.inf)
    row = int(np.argmin(score))
    return row if np.isfinite(score[row]) else None


def _line(chosen: Design, report: Report, found: Explorer, line: _Other, made: Design, other: Report) -> str:
    """Against the plan of `line`, which is `made` and has the report `other`, and whether one that does not fit would
    be best."""
    prices, scores = found.prices, found.scores()
    column = getattr(found.table, line.name)
    alike = (column == column[line.row]) & ~prices.fits
    best = float(np.min(scores[prices.fits]))
    missed = float(np.min(scores[alike], initial=np.inf)) < best
    text = _against(chosen, report, found.table, line, made, other)
    text = f"{text}; one that does not fit would be better than this plan" if missed else text
    return f"{text}; numerics differ between them" if line.name == "precision" else text


def _against(chosen: Design, report: Report, table: PlanTable, line: _Other, made: Design, other: Report) -> str:
    name, row, own = line.name, line.row, line.own
    theirs = int(getattr(table, name)[row])
    head = f"{_word(name, theirs)} instead of {_word(name, own, bare=True)}"
    return compared(chosen, report, made, other, head=head, rest=_changes(chosen, table, row, name))


def compared(chosen: Design, report: Report, made: Design, other: Report, *, head: str, rest: str = "") -> str:
    """What `made`, told in `head`, would take more of what the objective minimises than `chosen`, and on which line."""
    if chosen.job.objective is Objective.MEMORY:
        return f"{head} would need {format_bytes(other.peak_bytes)}, not {format_bytes(report.peak_bytes)}{rest}"
    ours, cost_of = (value.step_seconds * value.error_band[1] for value in (report, other))
    if chosen.job.objective is Objective.COST:
        ours, cost_of = ours * chosen.plan.world_size, cost_of * made.plan.world_size
    change = cost_of / ours - 1.0
    if abs(change) < CLOSE:
        return f"{head} would take as long{rest}"
    noun = "money" if chosen.job.objective is Objective.COST else "time"
    verb = f"would take {format_percent(abs(change))} {'more' if change > 0 else 'less'} {noun}"
    return f"{head} {verb}{rest}: {_cause(report, other)}{_surety(report, other) if change < 0 else ''}"


def _surety(report: Report, other: Report) -> str:
    """Why a plan that takes less time is not the best: it is likelier not to fit."""
    ours, theirs = report.fit_probability, other.fit_probability
    if ours is None or theirs is None or theirs >= ours:
        return ""
    return f"; but it fits with {format_percent(theirs)}, not {format_percent(ours)}"


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
    words += ["its axes in another order"] if table.order[row] and chosen.plan.has_usual_order else []
    return f" (with {' and '.join(words)})" if words else ""


def rejected_for_memory(table: PlanTable, costs: Prices, *, hopeless: int) -> tuple[Rejection, ...]:
    """How many plans do not fit, `hopeless` ones that were not priced with them, and the one that misses by least."""
    misses = ~costs.fits & costs.finite
    count = int(np.count_nonzero(misses)) + hopeless
    if not count:
        return ()
    if not misses.any():
        example = "one pipeline rank alone holds more than its device has"
        return (Rejection(rule="memory-fits", count=count, example=example),)
    row = int(np.argmin(np.where(misses, costs.memory_bytes / costs.capacity, np.inf)))
    need, has = float(costs.memory_bytes[row]), float(costs.capacity[row])
    words = row_words(table, row)
    example = f"{words} needs {format_bytes(need - has)} more than the {format_bytes(has)} there are"
    return (Rejection(rule="memory-fits", count=count, example=example),)


def row_words(table: PlanTable, row: int) -> str:
    """`tensor 8, pipeline 4, shard 16, zero1, microbatch 1`: a row without what it does not use."""
    words = [
        _word(name, int(getattr(table, name)[row]))
        for name in ("tensor", "context", "expert", "pipeline", "replicate", "shard")
        if int(getattr(table, name)[row]) > 1
    ]
    if table.sharding[row]:
        words.append(SHARDINGS[int(table.sharding[row])].value)
    words += [_word("microbatch", int(table.microbatch[row])), _word("recompute", int(table.recompute[row]))]
    return ", ".join(words)


def _value_of(chosen: Design, name: str) -> int:
    plan, group = chosen.plan, chosen.plan.first_group
    return {
        "precision": PRECISIONS.index(group.precision),
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "context": plan.context,
        "expert": plan.experts.expert if plan.experts else 0,
        "offload": OFFLOADS.index(group.offload),
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
    if name == "offload":
        return "no offload" if not value else f"{OFFLOADS[value].value} offloaded"
    if name == "expert" and not value:
        return "no grid of experts"
    if name == "precision":
        return PRECISIONS[value].value
    if name == "schedule":
        return SCHEDULES[value].value
    if name == "sequence_parallel":
        return "sequence parallel" if value else "no sequence parallel"
    return str(value) if bare else f"{name} {value}"
