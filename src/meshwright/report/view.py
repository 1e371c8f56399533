"""What a page shows, as values: the template places them and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.report.bars import memory_figure, waterfall
from meshwright.report.curves import loss_figure, speed_figure
from meshwright.report.diagnosis import incident_lines
from meshwright.report.explain import UNKNOWN, Explanation, explain_files
from meshwright.report.figure import Figure, Table
from meshwright.report.meetings import ways_cells
from meshwright.report.plans import PlansView, layout_table, plans_view
from meshwright.report.run_files import RunFiles
from meshwright.report.time_spent import goodput_figure
from meshwright.report.timeline_chart import timeline_figure
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.spec.span import Span
from meshwright.spec.units import format_bytes, format_count, format_interval, format_percent, format_seconds

_GOOD, _FAIR = 0.12, 0.3
_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A key figure; `tone` is good, fair, poor or plain."""

    label: str
    value: str
    note: str = ""
    tone: str = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run or plan."""

    anchor: str
    name: str
    kind: str
    plan: str
    facts: tuple[tuple[str, str], ...]
    explanation: Explanation
    tiles: tuple[Tile, ...]
    loss: Figure | None
    speed: Figure | None
    timeline: Figure | None
    waterfall: Figure | None
    memory: Figure | None
    time: Figure | None
    ways: Table | None
    layout: Table
    plans: PlansView | None
    sample: str | None
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    incidents: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """The page: one run, or several with a table and curves that compare them."""

    title: str
    runs: tuple[RunView, ...]
    comparison: Table | None
    figures: tuple[Figure, ...]


def page_view(runs: Sequence[RunFiles], *, timelines: Sequence[Sequence[Span]]) -> PageView:
    """The page of `runs`; `timelines[i]` is the predicted timeline of run i."""
    views = tuple(
        run_view(files, timeline=timeline, anchor=f"run-{index}")
        for index, (files, timeline) in enumerate(zip(runs, timelines, strict=True))
    )
    several = len(runs) > 1
    shared = (loss_figure(runs), speed_figure(runs)) if several else ()
    return PageView(
        title=runs[0].name if not several else f"{len(runs)} runs compared",
        runs=views,
        comparison=_comparison(views) if several else None,
        figures=tuple(figure for figure in shared if figure),
    )


def run_view(files: RunFiles, *, timeline: Sequence[Span], anchor: str) -> RunView:
    report = files.measured or files.predicted
    explanation = explain_files(files)
    return RunView(
        anchor=anchor,
        name=files.name,
        kind="plan" if files.is_plan else "run",
        plan=files.design.plan.describe(),
        facts=facts(files.design),
        explanation=explanation,
        tiles=_tiles(files),
        loss=loss_figure((files,)),
        speed=speed_figure((files,)),
        timeline=timeline_figure(files.design.plan, predicted=timeline, measured=files.spans),
        waterfall=waterfall(files.predicted, files.measured),
        memory=memory_figure(files.predicted, files.measured),
        time=goodput_figure(files.goodput),
        ways=ways_table(explanation),
        layout=layout_table(files.design),
        plans=plans_view(files.decision, chosen=files.design.plan.digest()),
        sample=files.sample,
        environment=_flat(files.environment or {}),
        notes=report.notes if report else (),
        incidents=tuple(line for incident in files.incidents for line in incident_lines(incident)[:1]),
    )


def ways_table(explanation: Explanation) -> Table | None:
    """The ways in which ranks could meet; None where they do not."""
    if not explanation.ways:
        return None
    head, *rows = ways_cells(explanation.ways)
    return Table(headers=head, rows=tuple(rows))


def _tiles(files: RunFiles) -> tuple[Tile, ...]:
    if not files.is_plan:
        return _run_tiles(files)
    return plan_tiles(files.predicted) if files.predicted else ()


def facts(design: Design) -> tuple[tuple[str, str], ...]:
    """Model, machines, batch and tokens to train, in words."""
    devices = f"{design.plan.world_size:,} of {design.cluster.num_devices:,} devices"
    return (
        ("model", f"{design.model.name}, {format_count(design.model.parameters)} parameters"),
        ("machines", f"{design.cluster.name}, {devices}"),
        ("batch", f"{format_count(design.plan.read_tokens)} tokens, sequences of {design.plan.sequence_length:,}"),
        ("to train", f"{format_count(design.job.total_tokens)} tokens, {design.job.total_steps:,} steps"),
    )


def _run_tiles(files: RunFiles) -> tuple[Tile, ...]:
    predicted, measured = files.predicted, files.measured
    last = files.steps[-1] if files.steps else {}
    return (
        _tile("tokens per second", measured, predicted, lambda report: report.tokens_per_second, _count),
        _tile("step time", measured, predicted, lambda report: report.step_seconds, format_seconds, tell_gap=True),
        _mfu_tile(measured, predicted),
        _tile(
            "memory allocated", measured, predicted, lambda report: report.allocated_bytes, format_bytes, tell_gap=True
        ),
        _validation_tile(files),
        Tile(
            label="training loss",
            value=_figure(last.get("loss"), "{:.3f}"),
            note=f"step {last['step']:,} of {files.design.job.total_steps:,}" if "step" in last else "no step yet",
        ),
        *_load_tiles(last.get("expert_load")),
    )


def _load_tiles(load: float | None) -> tuple[Tile, ...]:
    """How unevenly experts were chosen in the last step; nothing of a model without them."""
    if load is None:
        return ()
    return (Tile(label="expert load", value=_figure(load, "{:.2f}"), note="most chosen over the mean; 1 is even"),)


def _tile(
    label: str, measured: Report | None, predicted: Report | None, value: Any, show: Any, *, tell_gap: bool = False
) -> Tile:
    if measured is None:
        shown = show(value(predicted)) if predicted else UNKNOWN
        return Tile(label=label, value=shown, note="predicted" if predicted else "not measured")
    took = value(measured)
    if predicted is None or not value(predicted):
        return Tile(label=label, value=show(took), note="no prediction")
    said = value(predicted)
    gap = took / said - 1.0
    tone = ("good" if abs(gap) <= _GOOD else "fair" if abs(gap) <= _FAIR else "poor") if tell_gap else "plain"
    change = f"{gap + 1.0:.3g}{_SPACE}times" if gap > 1.0 else f"{100 * gap:+.1f}{_SPACE}%"
    change = f" ({change})" if tell_gap else ""
    return Tile(label=label, value=show(took), note=f"predicted {show(said)}{change}", tone=tone)


def _mfu_tile(measured: Report | None, predicted: Report | None) -> Tile:
    report = measured or predicted
    if report is None or report.mfu is None:
        return Tile(label="MFU", value=UNKNOWN, note="peak FLOP/s not known")
    note = "predicted" if measured is None else "model FLOPs utilisation"
    if measured is not None and predicted is not None and predicted.mfu is not None:
        note = f"predicted {format_percent(predicted.mfu)}"
    return Tile(label="MFU", value=format_percent(report.mfu), note=note)


def _validation_tile(files: RunFiles) -> Tile:
    label = "validation bits per byte"
    if not files.evaluations:
        return Tile(label=label, value=UNKNOWN, note="not evaluated")
    last = files.evaluations[-1]
    note = f"loss {_figure(last.get('validation_loss'), '{:.3f}')} at step {last.get('step', 0):,}"
    return Tile(label=label, value=_figure(last.get("bits_per_byte"), "{:.3f}"), note=note)


def plan_tiles(report: Report) -> tuple[Tile, ...]:
    """The key figures of a plan that nothing has measured."""
    low, high = report.error_band
    band = format_interval(low * report.step_seconds, high * report.step_seconds)
    capacity = max((stage.capacity for stage in report.memory), default=0.0)
    cost = report.total_cost
    return (
        Tile(label="tokens per second", value=_count(report.tokens_per_second), note="predicted"),
        Tile(
            label="step time",
            value=format_seconds(report.step_seconds),
            note=f"nine of ten: {band}" if high > low else "predicted",
        ),
        _mfu_tile(None, report),
        Tile(
            label="peak memory",
            value=format_bytes(report.peak_bytes),
            note=f"of {format_bytes(capacity)} a device{_chance(report)}",
            tone="good" if report.fits else "poor",
        ),
        Tile(
            label="time to train",
            value=format_seconds(_whole_run(report)) if report.total_tokens else UNKNOWN,
            note=f"{format_count(report.total_tokens)} tokens",
        ),
        Tile(
            label="cost",
            value=UNKNOWN if cost is None else f"${cost:,.0f}",
            note="price not known" if report.price_per_hour is None else f"${report.price_per_hour:,.2f} an hour",
        ),
    )


def _whole_run(report: Report) -> float:
    """Seconds to the token target, those lost to failures with them where they are known."""
    return report.total_seconds if report.outlook is None else report.outlook.seconds


def _chance(report: Report) -> str:
    return "" if report.fit_probability is None else f", fits with {format_percent(report.fit_probability)}"


def _comparison(views: Sequence[RunView]) -> Table:
    """One row a run: its plan and its key figures."""
    labels = tuple(dict.fromkeys(tile.label for view in views for tile in view.tiles))
    rows = []
    for view in views:
        found = {tile.label: tile.value for tile in view.tiles}
        rows.append((view.name, view.plan, *(found.get(label, UNKNOWN) for label in labels)))
    return Table(headers=("run", "plan", *labels), rows=tuple(rows), words=2)


def _flat(value: Mapping[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested tables as rows of dotted names; lists joined by spaces."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            rows.extend(_flat(item, f"{name}."))
        elif name.endswith("_bytes") and isinstance(item, (int, float)):
            rows.append((name.removesuffix("_bytes").replace("_", " "), format_bytes(item)))
        else:
            shown = " ".join(str(part) for part in item) if isinstance(item, list) else str(item)
            rows.append((name.replace("_", " "), UNKNOWN if item is None else shown))
    return tuple(rows)


def _figure(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) else UNKNOWN


def _count(value: float) -> str:
    return f"{value:,.0f}"
