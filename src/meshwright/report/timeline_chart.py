"""The pipeline timeline: what every rank does when, predicted above measured, on one axis of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from meshwright.report import svg
from meshwright.report.figure import Figure, Table, colour
from meshwright.spec.plan import AxisName, Plan
from meshwright.spec.report import LineName
from meshwright.spec.span import Span
from meshwright.spec.units import format_percent, format_seconds

_ROW, _BAR = 26.0, 20.0
_MOST_ROWS = 16
_MOST_TITLED = 420
_MOST_SPANS = 4500
_NUMBER_WIDTH = 0.028


def timeline_figure(plan: Plan, *, predicted: Sequence[Span], measured: Sequence[Span]) -> Figure | None:
    """One step of the plan as predicted and one sampled step as measured; None when neither is there.

    Measured rows are one worker for every pipeline rank (its first data and tensor rank), or the first workers
    where there is no pipeline.
    """
    step = measured_step(plan, measured)
    if not predicted and not step:
        return None
    rows = {"predicted": _rows(predicted), "measured": _rows(step)}
    whole = max(span.start + span.seconds for part in rows.values() for row in part.values() for span in row)
    seconds = _window(rows, whole)
    rows = {part: _clipped(ranks, seconds) for part, ranks in rows.items()} if seconds < whole else rows
    scale = svg.Scale(low=0.0, high=seconds or 1.0)
    name = {"predicted": "rank" if plan.pipeline > 1 else "device", "measured": "worker"}
    blocks = [_block(part, rows[part], scale, row_name=name[part]) for part in ("predicted", "measured") if rows[part]]
    kinds = dict.fromkeys(span.name for part in rows.values() for row in part.values() for span in row)
    return Figure(
        title="Timeline of one step",
        caption=_caption(plan, rows) + (_shown(seconds, whole) if seconds < whole else ""),
        body=f'<div class="timeline">{"".join(blocks)}{svg.time_axis(scale, show=format_seconds)}</div>',
        table=_table(rows, name),
        legend=tuple((colour(kind), kind) for kind in _ordered(kinds)),
        wide=True,
    )


def measured_step(plan: Plan, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of the sampled step of median length that most workers recorded, one worker a pipeline rank."""
    chosen = _workers(plan)
    steps: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.rank in chosen:
            steps[span.step].append(span)
    if not steps:
        return ()
    most = max(len({span.rank for span in found}) for found in steps.values())
    whole = {step: found for step, found in steps.items() if len({span.rank for span in found}) == most}
    lengths = sorted(
        (max(s.start + s.seconds for s in found) - min(s.start for s in found), step) for step, found in whole.items()
    )
    return tuple(whole[lengths[len(lengths) // 2][1]])


def step_table(spans: Sequence[Span], *, name: str) -> Table:
    """Seconds of every kind of work and the idle share of every rank of one step that begins at 0."""
    ranks: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.rank, span.start, -span.seconds)):
        ranks[span.rank].append(span)
    return _table({"predicted": ranks}, {"predicted": name})


def _workers(plan: Plan) -> frozenset[int]:
    """Ranks whose coordinates are 0 on every axis but the pipeline; the first ranks where there is no pipeline."""
    if plan.pipeline == 1:
        return frozenset(range(min(plan.world_size, _MOST_ROWS)))
    stride = 1
    for axis in reversed(plan.axes):
        if axis.name is AxisName.PIPELINE:
            break
        stride *= axis.size
    return frozenset(rank * stride for rank in range(plan.pipeline))


def _rows(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Spans by rank, from 0; at most _MOST_ROWS ranks, spread over all."""
    if not spans:
        return {}
    origin = min(span.start for span in spans)
    ranks = sorted({span.rank for span in spans})
    if len(ranks) > _MOST_ROWS:
        ranks = [ranks[round(index * (len(ranks) - 1) / (_MOST_ROWS - 1))] for index in range(_MOST_ROWS)]
    rows: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in spans:
        if span.rank in rows and span.name != LineName.BUBBLE:
            rows[span.rank].append(replace(span, start=span.start - origin))
    for row in rows.values():
        row.sort(key=lambda span: (span.start, -span.seconds))
    return rows


def _window(rows: Mapping[str, Mapping[int, list[Span]]], whole: float) -> float:
    """How much of the step is drawn: all of it, or as much from its start as holds _MOST_SPANS spans."""
    starts = sorted(span.start for part in rows.values() for row in part.values() for span in row)
    return whole if len(starts) <= _MOST_SPANS else starts[_MOST_SPANS]


def _clipped(rows: Mapping[int, list[Span]], seconds: float) -> dict[int, list[Span]]:
    return {
        rank: [replace(span, seconds=min(span.seconds, seconds - span.start)) for span in row if span.start < seconds]
        for rank, row in rows.items()
    }


def _shown(seconds: float, whole: float) -> str:
    return f" Shown: the first {format_seconds(seconds)} of {format_seconds(whole)}."


def _block(title: str, rows: Mapping[int, list[Span]], scale: svg.Scale, *, row_name: str) -> str:
    height = _ROW * len(rows)
    titled = _is_titled(rows)
    parts = []
    for index, row in enumerate(rows.values()):
        top = index * _ROW + (_ROW - _BAR) / 2
        parts.append(svg.bar(start=0.0, width=1.0, top=top, height=_BAR, kind="idle"))
        parts.extend(_titled(row, scale, top) if titled else _plain(row, scale, top))
    labels = "".join(f"<span>{escape(row_name)} {rank}</span>" for rank in rows)
    picture = svg.drawing(*parts, height=height, label=f"{title} timeline of one step")
    return (
        f'<h4>{escape(title)}</h4><div class="gantt">'
        f'<div class="rows" style="line-height:{_ROW:g}px" aria-hidden="true">{labels}</div>{picture}</div>'
    )


def _is_titled(rows: Mapping[int, list[Span]]) -> bool:
    """Few enough spans that each is drawn alone, with its number and its own words."""
    return sum(len(row) for row in rows.values()) <= _MOST_TITLED


def _titled(row: Sequence[Span], scale: svg.Scale, top: float) -> list[str]:
    parts = []
    for span in row:
        left, width = scale(span.start), span.seconds / (scale.high - scale.low)
        inset = 0.0 if span.microbatch >= 0 else 6.0
        parts.append(
            svg.bar(
                start=left,
                width=width,
                top=top + inset / 2,
                height=_BAR - inset,
                kind=colour(span.name),
                title=_said(span),
            )
        )
        if span.microbatch >= 0 and width > _NUMBER_WIDTH:
            parts.append(
                svg.text(
                    str(span.microbatch), class_="number", x=svg.percent(left + width / 2), y=f"{top + _BAR / 2 + 4:g}"
                )
            )
    return parts


def _plain(row: Sequence[Span], scale: svg.Scale, top: float) -> list[str]:
    """One shape a kind, for timelines of very many spans; neighbours closer than a hair are one."""
    merged: dict[str, list[list[float]]] = defaultdict(list)
    for span in row:
        left, right = scale(span.start), scale(span.start + span.seconds)
        pieces = merged[span.name]
        if pieces and left - pieces[-1][1] < 0.0005:
            pieces[-1][1] = right
        else:
            pieces.append([left, right])
    return [svg.stripes(pieces, top=top, height=_BAR, kind=colour(name)) for name, pieces in merged.items()]


def _said(span: Span) -> str:
    where = f" of microbatch {span.microbatch}, stage {span.stage}" if span.microbatch >= 0 else ""
    return f"{span.name}{where}: {format_seconds(span.seconds)}, from {format_seconds(span.start)}"


def _caption(plan: Plan, rows: Mapping[str, Mapping[int, list[Span]]]) -> str:
    drawn = all(_is_titled(part) for part in rows.values())
    numbers = " Numbers are microbatches." if plan.schedule.microbatches > 1 and drawn else ""
    if len(rows["predicted"]) < plan.pipeline and rows["predicted"]:
        numbers += f" {len(rows['predicted'])} of {plan.pipeline} pipeline ranks are shown."
    if not rows["measured"]:
        return f"Predicted; nothing is measured yet.{numbers}"
    if not rows["predicted"]:
        return f"Measured.{numbers}"
    return f"Predicted above, a sampled step as measured below, on the same axis.{numbers}"


def _table(rows: Mapping[str, Mapping[int, list[Span]]], names: Mapping[str, str]) -> Table:
    kinds = _ordered({span.name: None for part in rows.values() for row in part.values() for span in row})
    cells = []
    for part, ranks in rows.items():
        end = max((span.start + span.seconds for row in ranks.values() for span in row), default=0.0)
        for rank, row in ranks.items():
            sums: dict[str, float] = defaultdict(float)
            for span in row:
                sums[span.name] += span.seconds
            busy = _covered(row) / end if end else 0.0
            figures = (format_seconds(sums[kind]) if kind in sums else "" for kind in kinds)
            cells.append((f"{part}, {names[part]} {rank}", *figures, format_percent(1.0 - busy)))
    return Table(headers=("row", *kinds, "idle"), rows=tuple(cells))


def _covered(row: Sequence[Span]) -> float:
    """Seconds in which any span of a row sorted by start runs."""
    total, reached = 0.0, 0.0
    for span in row:
        end = span.start + span.seconds
        total += max(0.0, end - max(reached, span.start))
        reached = max(reached, end)
    return total


def _ordered(kinds: Mapping[str, None]) -> tuple[str, ...]:
    known = [name.value for name in LineName]
    return tuple(sorted(kinds, key=lambda kind: known.index(kind) if kind in known else len(known)))
