"""Bars: the step as a waterfall of its lines, and memory by part; predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.report import svg
from meshwright.report.explain import signed_seconds
from meshwright.report.figure import Figure, Table, colour
from meshwright.spec.report import Line, LineName, MemoryPart, Report, StageMemory
from meshwright.spec.units import LEAST_SHARE, format_bytes, format_seconds

_MOST_RANKS = 8


def waterfall(predicted: Report | None, measured: Report | None) -> Figure | None:
    """The lines of the step, each beginning where the one before ended; None when there is no report."""
    reports = {name: report for name, report in (("predicted", predicted), ("measured", measured)) if report}
    if not reports:
        return None
    names = _line_names(tuple(reports.values()))
    longest = max((_reach(report, names) for report in reports.values()), default=1.0) or 1.0
    rows, cells, begun = [], [], dict.fromkeys(reports, 0.0)
    for name in names:
        bars, figures = [], []
        for which, report in reports.items():
            line = report.step.find(name)
            seconds = line.seconds if line else None
            figures.append(seconds)
            bars.append(step_bar(which, name, seconds, begun[which], longest))
            begun[which] += seconds or 0.0
        rows.append(bar_row(name, "".join(bars), _gap_note(figures)))
        cells.append(_cells(name, figures))
    totals = [report.step_seconds for report in reports.values()]
    whole = "".join(
        step_bar(which, LineName.STEP, report.step_seconds, 0.0, longest) for which, report in reports.items()
    )
    rows.append(bar_row("step", whole, _gap_note(totals), extra=" total"))
    cells.append(_cells("step", totals))
    both = len(reports) == 2
    return Figure(
        title="Where the step goes",
        caption=(
            "Each line begins where the one before ends. Pale: predicted; full: measured; at the right, the difference."
            if both
            else f"Each line begins where the one before ends; {next(iter(reports))}."
        ),
        body=f'<div class="bars{"" if both else " single"}">{"".join(rows)}</div>',
        table=Table(headers=("line", *reports, *(("gap",) if both else ())), rows=tuple(cells)),
    )


def memory_figure(predicted: Report | None, measured: Report | None) -> Figure | None:
    """Bytes by part for every pipeline rank, the heaviest ones where there are many; None without figures."""
    stages = {
        name: {stage.rank: stage for stage in report.memory}
        for name, report in (("predicted", predicted), ("measured", measured))
        if report and report.memory
    }
    if not stages:
        return None
    ranks = sorted({rank for found in stages.values() for rank in found})
    heaviest = sorted(ranks, key=lambda rank: -max(found[rank].total for found in stages.values() if rank in found))
    shown = sorted(heaviest[:_MOST_RANKS])
    parts = memory_parts([stage for found in stages.values() for stage in found.values()])
    largest = max(stage.total for found in stages.values() for stage in found.values()) or 1.0
    capacity = max(stage.capacity for found in stages.values() for stage in found.values())
    scale = max(largest, capacity) if capacity <= 1.8 * largest else largest * 1.04
    rows = []
    for rank in shown:
        bars = "".join(
            _memory_bar(which, found[rank], parts, scale) for which, found in stages.items() if rank in found
        )
        note = " / ".join(format_bytes(found[rank].total) for found in stages.values() if rank in found)
        rows.append(bar_row(f"rank {rank}", bars, note))
    cells = tuple(
        (
            f"rank {rank}, {which}",
            *(format_bytes(found[rank].parts.get(part, 0.0)) for part in parts),
            format_bytes(found[rank].total),
            format_bytes(found[rank].capacity),
        )
        for rank in ranks
        for which, found in stages.items()
        if rank in found
    )
    order = "Predicted above, measured below. " if len(stages) == 2 else f"As {next(iter(stages))}. "
    few = f"The {_MOST_RANKS} heaviest of {len(ranks)} ranks. " if len(ranks) > _MOST_RANKS else ""
    return Figure(
        title="Memory at the peak",
        caption=f"{order}{few}Heaviest device of each pipeline rank, which may use {format_bytes(capacity)}.",
        body=f'<div class="bars memory">{"".join(rows)}</div>',
        table=Table(headers=("device", *parts, "total", "capacity"), rows=cells),
        legend=(*((colour(part), part) for part in parts), *((("capacity", "capacity"),) if capacity <= scale else ())),
    )


def _line_names(reports: Sequence[Report]) -> list[str]:
    known = [name.value for name in LineName]
    found = dict.fromkeys(line.name for report in reports for line in report.step.lines)
    names = [
        name
        for name in found
        if any(abs(_seconds_of(report.step.find(name))) > LEAST_SHARE * report.step_seconds for report in reports)
    ]
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _seconds_of(line: Line | None) -> float:
    return line.seconds if line else 0.0


def _reach(report: Report, names: Sequence[str]) -> float:
    return max(report.step_seconds, sum(max(0.0, _seconds_of(report.step.find(name))) for name in names))


def step_bar(which: str, name: str, seconds: float | None, begun: float, longest: float) -> str:
    """One bar; the style sheet makes the first of a pair pale."""
    if seconds is None:
        return svg.drawing(height=12, label=f"{name}: {which} not known")
    start, width = min(begun, begun + seconds) / longest, abs(seconds) / longest
    kind = colour(name)
    said = f"{name}, {which}: {format_seconds(seconds)}"
    return svg.drawing(
        svg.bar(start=max(start, 0.0), width=width, top=0, height=12, kind=kind, title=said, smallest=0.003),
        height=12,
        label=said,
    )


def _memory_bar(which: str, stage: StageMemory, parts: Sequence[str], scale: float) -> str:
    at, bars = 0.0, []
    for part in parts:
        count = stage.parts.get(part, 0.0)
        if count > 0:
            said = f"{part}, {which}: {format_bytes(count)}"
            kind = colour(part)
            bars.append(svg.bar(start=at / scale, width=count / scale, top=0, height=14, kind=kind, title=said))
            at += count
    if stage.capacity <= scale:
        bars.append(svg.bar(start=stage.capacity / scale - 0.004, width=0.004, top=0, height=14, kind="capacity"))
    return svg.drawing(*bars, height=14, label=f"rank {stage.rank}, {which}: {format_bytes(stage.total)}")


def bar_row(name: str, bars: str, note: str, *, extra: str = "") -> str:
    return (
        f'<div class="bar{extra}"><span class="name">{escape(name)}</span>'
        f'<div class="pair">{bars}</div><span class="note">{escape(note)}</span></div>'
    )


def _gap_note(figures: Sequence[float | None]) -> str:
    if len(figures) == 1:
        return format_seconds(figures[0]) if figures[0] is not None else "N/A"
    first, second = figures
    return signed_seconds(None if first is None or second is None else second - first)


def _cells(name: str, figures: Sequence[float | None]) -> tuple[str, ...]:
    shown = tuple("N/A" if value is None else format_seconds(value) for value in figures)
    return (name, *shown, _gap_note(figures)) if len(figures) == 2 else (name, *shown)


def memory_parts(stages: Sequence[StageMemory]) -> tuple[str, ...]:
    known = [part.value for part in MemoryPart]
    found = dict.fromkeys(part for stage in stages for part, count in stage.parts.items() if count > 0)
    return tuple(sorted(found, key=lambda part: known.index(part) if part in known else len(known)))
