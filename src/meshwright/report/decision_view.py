"""What the page of a decision shows, as values: why, the ranked plans, a panel for each, what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright import cost
from meshwright.report import terminal
from meshwright.report.decision_data import document, plan_data
from meshwright.report.drawn_step import DrawnStep, drawn_step
from meshwright.report.explain import UNKNOWN, explain_files
from meshwright.report.figure import Figure, Table, colour
from meshwright.report.launches import Launch, launches
from meshwright.report.losses import losses_figure
from meshwright.report.memory_columns import memory_of_ranks
from meshwright.report.plans import layout_table
from meshwright.report.rows import plan_names
from meshwright.report.run_files import RunFiles
from meshwright.report.scatter import front, scatter
from meshwright.report.settings import Setting, settings
from meshwright.report.timeline_chart import step_table, timeline_figure
from meshwright.report.view import Tile, facts, plan_tiles, ways_table
from meshwright.search import Candidate, Decision
from meshwright.search.candidate import candidate
from meshwright.spec.report import Gap, LineName, Report, diff
from meshwright.spec.units import (
    LEAST_SHARE,
    format_bytes,
    format_change,
    format_count,
    format_interval,
    format_percent,
    format_seconds,
)

MOST_PLANS = 40
_NOTICED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a table that can be sorted: what is read, and the number it is sorted by."""

    text: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRow:
    """One plan of the table; `cells` follow its number and its name."""

    number: int
    name: str
    marks: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """The step that scripts draw: what is said of it, its colours, its seconds as a table; `still` is drawn without."""

    caption: str
    legend: tuple[tuple[str, str], ...]
    table: Table
    still: Figure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelView:
    """One plan looked at closely; `differs` are the names of settings that are not those of the chosen plan."""

    number: int
    name: str
    marks: tuple[str, ...]
    sentences: tuple[str, ...]
    tiles: tuple[Tile, ...]
    timeline: TimelineView | None
    losses: Figure
    memory: Figure | None
    ways: Table | None
    layout: Table
    settings: tuple[Setting, ...]
    differs: frozenset[str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionView:
    """The page. `chosen` is the number of the plan that the decision takes; `data` is JSON for the scripts."""

    title: str
    facts: tuple[tuple[str, str], ...]
    summary: str
    objective: str
    ordered_by: str
    job: tuple[str, ...]
    why: tuple[str, ...]
    binding: str
    refused: Table | None
    predicts_only: tuple[str, ...]
    headers: tuple[str, ...]
    rows: tuple[RankedRow, ...]
    scatter: Figure
    panels: tuple[PanelView, ...]
    launches: tuple[Launch, ...]
    chosen: int
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """One ranked plan with all that is known of it; the numbers of plans begin at 1."""

    number: int
    files: RunFiles
    entry: Candidate
    report: Report
    step: DrawnStep | None
    marks: tuple[str, ...]


def decision_view(decision: Decision) -> DecisionView:
    """The page of `decision`, every ranked plan priced and played again: at most MOST_PLANS of them."""
    ranked = decision.ranked[:MOST_PLANS]
    digests = [entry.plan.digest() for entry in ranked]
    own = decision.design.plan.digest()
    chosen = digests.index(own) if own in digests else 0
    plans = [_priced(decision, index, chosen=chosen) for index in range(len(ranked))]
    best = plans[chosen]
    rejected = tuple((entry.rule, entry.example, f"{entry.count:,}") for entry in decision.rejected if entry.count)
    return DecisionView(
        title=f"{decision.design.model.name} on {decision.design.cluster.name}",
        facts=facts(decision.design),
        summary=_summary(decision, shown=len(ranked)),
        objective=decision.design.job.objective.value,
        ordered_by=decision.ordered_by,
        job=(*filter(None, [terminal.chance_words(decision.report)]), *terminal.job_words(decision)),
        why=decision.why,
        binding=best.report.bottleneck,
        refused=Table(headers=("rule", "for example", "combinations"), rows=rejected, words=2) if rejected else None,
        predicts_only=tuple(str(problem) for problem in decision.predicts_only),
        headers=_HEADERS,
        rows=tuple(
            _row(plan, name) for plan, name in zip(plans, plan_names([entry.plan for entry in ranked]), strict=True)
        ),
        scatter=scatter([plan.entry for plan in plans], chosen=chosen),
        panels=tuple(_panel(plan, best) for plan in plans),
        launches=launches(best.files.design),
        chosen=best.number,
        data=document([_data(plan) for plan in plans], chosen=best.number),
    )


def _data(plan: _Priced) -> dict[str, Any]:
    return plan_data(plan.files.design, plan.report, plan.step)


def _priced(decision: Decision, index: int, *, chosen: int) -> _Priced:
    design = replace(decision.design, plan=decision.ranked[index].plan)
    report = cost.predict(design)
    files = RunFiles(name=f"plan {index + 1}", path=Path(), is_plan=True, design=design, predicted=report)
    return _Priced(
        number=index + 1,
        files=files,
        entry=candidate(design, report),
        report=report,
        step=drawn_step(design),
        marks=_marks(decision.ranked[:MOST_PLANS], index, chosen=chosen),
    )


def _marks(ranked: Sequence[Candidate], index: int, *, chosen: int) -> tuple[str, ...]:
    fastest = min(range(len(ranked)), key=lambda other: ranked[other].step_seconds)
    smallest = min(range(len(ranked)), key=lambda other: ranked[other].peak_bytes)
    found = ["chosen"] if index == chosen else []
    found += ["fastest"] if index == fastest else []
    found += ["least memory"] if index == smallest else []
    found += ["on the front"] if index in front(ranked) and index not in (fastest, smallest) else []
    return tuple(found)


_HEADERS = ("step", "band", "ranked by", "tokens/s", "MFU", "memory", "free", "fits", "bubble", "comm.", "cost")


def _row(plan: _Priced, name: str) -> RankedRow:
    entry = plan.entry
    low, high = (end * entry.step_seconds for end in entry.error_band)
    expected = entry.expected_seconds or 0.0
    cells = (
        Cell(text=format_seconds(entry.step_seconds), value=entry.step_seconds),
        Cell(text=format_interval(low, high), value=high),
        Cell(text=format_seconds(expected), value=expected),
        Cell(text=format_count(entry.tokens_per_second), value=entry.tokens_per_second),
        _share(entry.mfu),
        Cell(text=format_bytes(entry.peak_bytes), value=entry.peak_bytes),
        Cell(text=format_bytes(entry.free_bytes), value=entry.free_bytes),
        _share(entry.fit_probability),
        _share(entry.bubble_share),
        _share(entry.communication_share),
        Cell(
            text=UNKNOWN if entry.total_cost is None else f"${format_count(entry.total_cost)}",
            value=entry.total_cost or 0.0,
        ),
    )
    return RankedRow(number=plan.number, name=name, marks=plan.marks, cells=cells)


def _share(value: float | None) -> Cell:
    return Cell(text=UNKNOWN if value is None else format_percent(value), value=value or 0.0)


def _panel(plan: _Priced, best: _Priced) -> PanelView:
    explanation = explain_files(plan.files)
    own, theirs = settings(plan.files.design), dict(settings(best.files.design))
    against = (_against(plan, best),) if plan is not best else ()
    return PanelView(
        number=plan.number,
        name=plan.entry.plan.describe(),
        marks=plan.marks,
        sentences=(explanation.headline, *against, *explanation.sentences),
        tiles=plan_tiles(plan.report),
        timeline=_timeline(plan, still=plan is best),
        losses=losses_figure(plan.report),
        memory=memory_of_ranks(plan.report),
        ways=ways_table(explanation),
        layout=layout_table(plan.files.design),
        settings=own,
        differs=frozenset(name for name, value in own if value != theirs[name]),
        notes=plan.report.notes,
    )


def _against(plan: _Priced, best: _Priced) -> str:
    """How this plan stands to the chosen one, and the line that makes most of the difference."""
    ours, theirs = plan.report, best.report
    change = ours.step_seconds / theirs.step_seconds - 1.0
    room = ours.peak_bytes - theirs.peak_bytes
    memory = (
        f"and its peak is {format_bytes(abs(room))} {'higher' if room > 0 else 'lower'}"
        if room
        else "and needs as much memory"
    )
    if abs(change) < LEAST_SHARE:
        return f"It takes as long as plan {best.number}, the chosen one, {memory}."
    worst = _largest(diff(theirs, ours)[1:], slower=change > 0)
    return (
        f"It takes {format_change(change, noun='time', than=f'plan {best.number}, the chosen one')}, {memory}; most "
        f"of the difference is {worst.name}: {format_seconds(worst.predicted)} there, "
        f"{format_seconds(worst.measured)} here."
    )


def _largest(gaps: Sequence[Gap], *, slower: bool) -> Gap:
    return max(gaps, key=lambda gap: gap.seconds if slower else -gap.seconds)


def _timeline(plan: _Priced, *, still: bool) -> TimelineView | None:
    step = plan.step
    if step is None:
        return None
    names = [name.value for name in LineName]
    kinds = sorted({span.name for span in step.spans}, key=lambda kind: names.index(kind) if kind in names else 99)
    design = plan.files.design
    return TimelineView(
        caption=_caption(step) + _missing(step, plan.report),
        legend=tuple((colour(kind), kind) for kind in kinds),
        table=step_table(step.spans, name="rank" if design.plan.pipeline > 1 else "device"),
        still=timeline_figure(design.plan, predicted=step.spans, measured=()) if still else None,
    )


def _caption(step: DrawnStep) -> str:
    ranks = f"All {step.ranks} pipeline ranks" if step.ranks > 1 else "One device; all do the same"
    if step.is_whole:
        return f"{ranks}, predicted. Numbers are microbatches; actions too thin to be seen are drawn as their mix."
    return (
        f"{ranks}, predicted. Drawn are {step.microbatches:,} of {step.of:,} microbatches: the beginning and the end "
        "are those of the whole step, its middle goes on in the same way. What is idle is a larger share here than of "
        "the whole step. Actions too thin to be seen are drawn as their mix."
    )


def _missing(step: DrawnStep, report: Report) -> str:
    """How far the drawing is from the step, where that is more than can be overlooked."""
    gap = report.step_seconds - step.seconds
    if not step.is_whole or abs(gap) < _NOTICED * report.step_seconds:
        return ""
    when = f"{format_seconds(abs(gap))} {'before' if gap > 0.0 else 'after'}"
    return f" It ends {when} the predicted step does: not all lines are placed on ranks as they are priced."


def _summary(decision: Decision, *, shown: int) -> str:
    few = f"; the best {shown} are shown" if shown < len(decision.ranked) else ""
    count, time = decision.considered, format_seconds(decision.seconds)
    plans = f"{count:,} legal {'plan was' if count == 1 else 'plans were'}"
    if decision.priced >= count:
        return f"{plans} priced in {time}, {decision.fitting:,} fit in memory{few}."
    return (
        f"{plans} searched in {time}; {decision.priced:,} that could be best were priced, {decision.fitting:,} of them "
        f"fit in memory{few}."
    )
