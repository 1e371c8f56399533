"""Why the best plan is best: against the best plan that differs in one dimension, and which line makes the gap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.table import OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.search.alternatives import Alternatives
from meshwright.search.candidate import TIE
from meshwright.search.constraints import Value
from meshwright.search.explore import Explorer
from meshwright.search.meetings import meeting_words
from meshwright.search.prices import Prices
from meshwright.search.product import Rejection
from meshwright.search.worth import worth
from meshwright.spec.job import Objective
from meshwright.spec.plan import AxisName, Design, Recompute, Sharding
from meshwright.spec.report import Gap, LineName, Report, diff
from meshwright.spec.synchronize import MEETINGS
from meshwright.spec.units import (
    LEAST_SHARE,
    MANIFOLD,
    format_bytes,
    format_change,
    format_percent,
    format_seconds,
    format_times,
)

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
    "sync",
)
NUMERICS = ("precision", "sync")  # dimensions whose every other value has a line of its own


Entry = tuple[Design, Report]
Answer = tuple[Entry | None, bool]  # the best plan of a line, and whether all that may be better was weighed


def why(
    ranked: Sequence[Entry], found: Explorer, *, best: Callable[[Sequence[Alternatives]], Sequence[Answer]]
) -> tuple[str, ...]:
    """One line for every dimension: what the best plan with another value of it than the first of `ranked` would cost,
    and where; and of a plan that is ranked behind though its step is shorter, its figures.

    Of what changes the numerics there is one line for every other value that the job allows. Alternatives are
    free in every other dimension, so that a line says what the dimension is worth and not what one careless change
    would do. `best` prices what may hold better alternatives, of all lines together, and gives the best of each as the
    ranked plans are laid out; so a line says what a question of `why_not` does.
    """
    chosen, report = ranked[0]
    asked = list(_asked(found, chosen))
    told, lines = set[str](), []
    for one, (entry, sure) in zip(asked, best(asked), strict=True):
        if entry is None:
            tried = " or ".join(_word(one.name, value) for value in one.values)
            known = "is legal" if not _is_legal(found, one) else "fits" if sure else "was seen to fit"
            fast = " in the time that the job leaves" if known != "is legal" and found.within < np.inf else ""
            lines.append(f"{_own_word(chosen, one.name)}: no plan with {tried} {known}{fast}")
            continue
        made, priced = entry
        if made.plan.digest() not in told:
            told.add(made.plan.digest())
            value = _value_of(made, one.name)
            numerics = "; numerics differ between them" if one.name in NUMERICS else ""
            unsure = "" if sure else f"; not every plan with {_word(one.name, value)} was weighed"
            line = _against(chosen, report, made, priced, name=one.name)
            line += _shorter(ranked, priced, name=one.name, values=one.values)
            line += _unmasked(chosen, report, made) if one.name == "context" else ""
            lines.append(line + _missed(found, one.name, value) + numerics + unsure)
    return (*lines, *_order(chosen, report))


def _shorter(ranked: Sequence[Entry], told: Report, *, name: str, values: Sequence[int]) -> str:
    """That another plan with one of `values` has a shorter step than the first of `ranked`, and what it is ranked
    behind for, where that which is `told` has none; nothing where time is not what is minimised."""
    chosen, report = ranked[0]
    others = [entry for entry in ranked[1:] if _value_of(entry[0], name) in values]
    least = (1.0 - TIE) * report.step_seconds
    if chosen.job.objective is not Objective.TIME or told.step_seconds <= least or not others:
        return ""
    made, other = min(others, key=lambda entry: entry[1].step_seconds)
    if other.step_seconds > least:
        return ""
    ours, theirs = (worth(each.plan, parameters=chosen.model.parameters) for each in (chosen, made))
    behind = ranked_behind(report, other, objective=Objective.TIME, counts=(ours, theirs))
    steps = f"{format_seconds(other.step_seconds)} a step, not {format_seconds(report.step_seconds)}"
    return f"; another with {_own_word(made, name)}{changes(chosen, made, but=name)} takes {steps}, but {behind}"


def _unmasked(chosen: Design, report: Report, made: Design) -> str:
    """What `made`, whose sequences are whole, would take if documents saw each other, where that is less than the
    chosen plan over context ranks takes: kernels that take a mask work out all scores, those over context ranks skip
    most."""
    data = made.job.data
    if made.plan.context > 1 or chosen.plan.context == 1 or not data.document_mask:
        return ""
    whole = cost.predict(replace(made, job=replace(made.job, data=replace(data, document_mask=False))))
    if not whole.fits or whole.step_seconds > (1.0 - TIE) * report.step_seconds:
        return ""
    return f"; with data.document_mask = false it would take {format_seconds(whole.step_seconds)} a step"


def _asked(found: Explorer, chosen: Design) -> Iterator[Alternatives]:
    """Dimensions with the values other than that of `chosen` that one line is of; on one device no order of passes
    is another plan."""
    for name in DIMENSIONS:
        if name == "schedule" and found.cluster.num_devices == 1:
            continue
        own = _value_of(chosen, name)
        others = [value for value in _values(found, name) if value != own]
        if name in NUMERICS:
            yield from (Alternatives(found, name=name, values=(value,)) for value in others)
        elif name == "context" and own > 1 and 1 in others and chosen.job.data.document_mask:
            yield from (Alternatives(found, name=name, values=values) for values in _by_masks(others) if values)
        elif others and len(_values(found, name)) > 1 and not (name == "offload" and own == 0):
            yield Alternatives(found, name=name, values=tuple(others))


def _by_masks(others: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Other context degrees, apart from 1: masks of documents cost whole sequences more than those over ranks."""
    return tuple(value for value in others if value > 1), (1,)


def _order(chosen: Design, report: Report) -> Iterator[str]:
    """What the same plan with its axes in the usual order would cost, where they are in another."""
    plan = chosen.plan
    if plan.has_usual_order:
        return
    usual = replace(plan, axes=tuple(sorted(plan.axes, key=lambda axis: list(AxisName).index(axis.name))))
    named = " x ".join(f"{axis.name.value} {axis.size}" for axis in usual.axes if axis.size > 1)
    turned = replace(chosen, plan=usual)
    head = f"{named}, the usual order of axes, instead of this one"
    yield compared(chosen, report, turned, cost.predict(turned), head=head)


def held(name: str, value: int) -> dict[str, Value]:
    """The setting that keeps a dimension at `value`; none for no grid of experts, which no column names."""
    if name == "expert" and not value:
        return {}
    words: dict[str, Value] = {
        "precision": PRECISIONS[value].value if name == "precision" else "",
        "sharding": SHARDINGS[value].value if name == "sharding" else "",
        "recompute": RECOMPUTES[value].value if name == "recompute" else "",
        "offload": OFFLOADS[value].value if name == "offload" else "",
        "schedule": SCHEDULES[value].value if name == "schedule" else "",
        "sequence_parallel": "on" if value else "off",
        "sync": MEETINGS[value] if name == "sync" else "",
    }
    return {"zero" if name == "sharding" else name: words.get(name, value)}


def _values(found: Explorer, name: str) -> list[int]:
    """Every value of a dimension that the space holds."""
    frames = found.space.frames
    if name in frames:
        return [int(value) for value in np.unique(frames[name])]
    return found.space.values(name)


def _missed(found: Explorer, name: str, value: int) -> str:
    """That a plan with the value that does not fit would be better than all that do, where one would."""
    prices, scores = found.prices, found.scores()
    alike = (getattr(found.table, name) == value) & ~prices.fits
    missed = float(np.min(scores[alike], initial=np.inf)) < float(np.min(scores[prices.fits]))
    return "; one that does not fit would be better than this plan" if missed else ""


def _against(chosen: Design, report: Report, made: Design, other: Report, *, name: str) -> str:
    """The design `made`, which has another value of the dimension `name`, against the chosen one."""
    head = f"{_word(name, _value_of(made, name))} instead of {_own_word(chosen, name, bare=True)}"
    return compared(chosen, report, made, other, head=head, rest=changes(chosen, made, but=name))


def _is_legal(found: Explorer, one: Alternatives) -> bool:
    """Whether the space has a plan that is one of these, as far as its frames tell."""
    column = found.space.frames.get(one.name)
    return column is None or bool(found.space.sizes[np.isin(column, one.values)].any())


def compared(chosen: Design, report: Report, made: Design, other: Report, *, head: str, rest: str = "") -> str:
    """What `made`, told in `head`, would take more than `chosen` of what the objective minimises, and on which line."""
    objective = chosen.job.objective
    if objective is Objective.MEMORY:
        return f"{head} would need {format_bytes(other.peak_bytes)}, not {format_bytes(report.peak_bytes)}{rest}"
    cost_counts = objective is Objective.COST
    share = made.plan.world_size / chosen.plan.world_size if cost_counts else 1.0
    change = share * other.step_seconds / report.step_seconds - 1.0
    told = _on_devices(chosen, made) + rest
    if abs(change) < TIE:
        return f"{head} would {'cost as much' if cost_counts else 'take as long'}{told}"
    much = format_change(change, noun="money" if cost_counts else "time")
    ours, theirs = (worth(each.plan, parameters=chosen.model.parameters) for each in (chosen, made))
    ranked = ranked_behind(report, other, objective=objective, counts=(ours, theirs))
    cause = _cause(report, other, share=share, slower=change > 0)
    return f"{head} would take {much}{told}: {cause}{'' if change > 0 else f'; but {ranked}'}"


def _on_devices(chosen: Design, made: Design) -> str:
    """` on 12 devices, not 16`; nothing where both use as many."""
    ours, theirs = chosen.plan.world_size, made.plan.world_size
    return "" if ours == theirs else f" on {theirs:,} device{'s' * (theirs > 1)}, not {ours:,}"


def ranked_behind(
    report: Report, other: Report, *, objective: Objective, counts: tuple[float, float] = (1.0, 1.0)
) -> str:
    """`19 of 20 of its steps stay under 21 s, not 20 s, and it fits with 94.9 %, not 98.9 %`: the figures that
    rank a plan of report `other` behind one of `report` though it has less of what the objective minimises; all of
    them where none does. Where that is cost and devices differ, steps are told in device-seconds; a step of the two
    `counts` for so many, of `report` first, where learners or compressed gradients take more to the same loss."""
    whole = objective is Objective.COST and report.devices != other.devices
    upper = [each.step_seconds * each.error_band[1] * (each.devices if whole else 1) for each in (other, report)]
    shown = tuple(f"{value:,.4g} device-seconds" if whole else format_seconds(value) for value in upper)
    fits = [1.0 if each.fit_probability is None else each.fit_probability for each in (other, report)]
    more = upper[0] / upper[1] - 1.0
    steps = f"19 of 20 of its steps stay under {_not(*shown)}"
    if shown[0] == shown[1] and more >= LEAST_SHARE:
        steps = f"19 of 20 of its steps stay under a time that is {format_percent(more)} longer"
    chance = f"it fits with {_not(*(format_percent(each) for each in fits))}"
    slower, unlikelier = upper[0] > upper[1], fits[1] - fits[0] > LEAST_SHARE
    told = [steps] * (slower or not unlikelier) + [chance] * (unlikelier or not slower)
    if counts[0] != counts[1]:
        slowly = (
            f"to the same loss it takes {counts[1]:.3g} times the steps of ranks that meet in each, not {counts[0]:.3g}"
        )
        told = [steps, slowly]
    return ", and ".join(told)


def _not(theirs: str, ours: str) -> str:
    """`21 s, not 20 s`, or `21 s too` where the two read alike."""
    return f"{theirs} too" if theirs == ours else f"{theirs}, not {ours}"


def _cause(report: Report, other: Report, *, share: float, slower: bool) -> str:
    """The line that grows most from `report` to `other`, or shrinks most, from and to shares of the step; of a plan
    whose devices are `share` of those of `report` so much of every line counts."""
    gaps = [gap for gap in diff(report, other)[1:] if gap.name != LineName.STEP]
    grown = {gap.name: share * gap.measured - gap.predicted for gap in gaps}
    worst = max(gaps, key=lambda gap: grown[gap.name] if slower else -grown[gap.name])
    other_way = min(gaps, key=lambda gap: grown[gap.name] if slower else -grown[gap.name])
    of = "this step" if share == 1.0 else "the device-seconds of this step"
    told = _from_to(worst, report, of, share=share)
    if abs(grown[other_way.name]) < 0.5 * abs(grown[worst.name]) or grown[other_way.name] * grown[worst.name] >= 0.0:
        return told
    return f"{told}, against {_from_to(other_way, report, 'it', share=share)}"


def _from_to(gap: Gap, report: Report, of: str, *, share: float) -> str:
    """`backward 8.4 % to 12.1 % of this step`, which is that of `report`."""
    before, after = gap.predicted / report.step_seconds, share * gap.measured / report.step_seconds
    if max(before, after) > MANIFOLD:
        return f"{gap.name} {before:.2f} to {format_times(after)} {of}"
    return f"{gap.name} {format_percent(before)} to {format_percent(after)} of {of}"


def changes(chosen: Design, made: Design, *, but: str = "") -> str:
    """`, with shard 64 and microbatch 2`: what else the alternative changes to be at its best."""
    others = [other for other in DIMENSIONS if other != but]
    changed = [other for other in others if _value_of(made, other) != _value_of(chosen, other)]
    words = [_own_word(made, other) for other in changed[:3]]
    turned = not made.plan.has_usual_order and chosen.plan.has_usual_order
    words += ["its axes in another order"] if turned else []
    moved = made.plan.world_size == chosen.plan.world_size and made.plan.placement != chosen.plan.placement
    words += ["the machines in another order"] if moved else []
    return f" (with {' and '.join(words)})" if words else ""


def rejected_for_memory(table: PlanTable, costs: Prices, *, hopeless: int) -> tuple[Rejection, ...]:
    """How many plans do not fit, `hopeless` ones that were not priced with them, and the one that misses by least."""
    misses = ~costs.fits & costs.finite
    count = int(np.count_nonzero(misses)) + hopeless
    if not count:
        return ()
    if not misses.any():
        example = "one pipeline rank alone holds more than its device has; none of these was priced"
        return (Rejection(rule="memory-fits", count=count, example=example),)
    row = int(np.argmin(np.where(misses, costs.filled, np.inf)))
    example = f"{row_words(table, row)} {costs.need(row)}"
    example += f"; {hopeless:,} of these hold too much at the least, and were not priced" if hopeless else ""
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
    words += [_word("offload", int(table.offload[row]))] if table.offload[row] else []
    return ", ".join(words)


MIXED = -1  # of a dimension in which the blocks of a plan differ


def _value_of(chosen: Design, name: str) -> int:
    plan, group = chosen.plan, chosen.plan.first_group
    groups = [each for stage in plan.stages for each in stage.groups]
    if name in ("recompute", "offload", "sharding") and len({getattr(each, name) for each in groups}) > 1:
        return MIXED
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
        "sync": MEETINGS.index(plan.gradients.word),
    }[name]


def _own_word(design: Design, name: str, *, bare: bool = False) -> str:
    """The word of a design's own value; `full recompute in 12 blocks` where blocks differ."""
    value = _value_of(design, name)
    if value != MIXED:
        return _word(name, value, bare=bare)
    counts: dict[int, int] = {}
    known: Sequence[StrEnum] = {"recompute": RECOMPUTES, "offload": OFFLOADS, "sharding": SHARDINGS}[name]
    for group in design.plan.groups:
        kind = known.index(getattr(group, name))
        counts[kind] = counts.get(kind, 0) + group.stop - group.start
    told = (f"{_word(name, kind)} in {count} blocks" for kind, count in sorted(counts.items()) if kind)
    return " and ".join(told)


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
    if name == "sync":
        return meeting_words(MEETINGS[value], whole="meeting in every step")
    return str(value) if bare else f"{name} {value}"
