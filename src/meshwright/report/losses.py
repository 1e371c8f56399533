"""From ideal compute to the step: what each line of a prediction adds, and how sure the sum is."""

from __future__ import annotations

from meshwright.report import svg
from meshwright.report.bars import bar_row, step_bar
from meshwright.report.figure import Figure, Table
from meshwright.report.waterfall import waterfall
from meshwright.spec.report import Line, LineName, Report
from meshwright.spec.units import LEAST_SHARE, format_interval, format_percent, format_seconds

_SPACE = "\N{NO-BREAK SPACE}"


def losses_figure(report: Report) -> Figure:
    """The waterfall as bars, each beginning where the one before ends, then the step and its band."""
    step, bars = report.step_seconds, waterfall(report).bars
    low, high = report.error_band
    longest = max(step * max(high, 1.0), sum(max(bar.seconds, 0.0) for bar in bars)) or 1.0
    rows = []
    for bar in bars:
        if abs(bar.share) > LEAST_SHARE:
            drawn = step_bar("predicted", bar.name, bar.seconds, bar.start, longest)
            rows.append(bar_row(bar.name, drawn, format_seconds(bar.seconds)))
    whole = step_bar("predicted", LineName.STEP, step, 0.0, longest)
    rows.append(bar_row("step", whole, format_seconds(step), extra=" total"))
    if high > low:
        ends = format_interval(low * step, high * step).replace(" ", _SPACE).replace(f"{_SPACE}to{_SPACE}", " to ")
        drawn = svg.bar(
            start=low * step / longest, width=(high - low) * step / longest, top=3, height=6, kind="band", title=ends
        )
        rows.append(bar_row("band", svg.drawing(drawn, height=12, label=f"band: {ends}"), ends))
    return Figure(
        title="Where the step goes",
        caption=(
            "Each line begins where the one before ends; predicted."
            + (" Band: where measured steps lie if errors stay what they were." * (high > low))
        ),
        body=f'<div class="bars single">{"".join(rows)}</div>',
        table=_table(report),
    )


def _table(report: Report) -> Table:
    """Every line of the report with the parts inside it, its share of the step and its note."""
    rows = []
    for depth, line in report.step.walk():
        if line.seconds or depth == 0:
            rows.append(_cells(line, depth=depth, step=report.step_seconds))
    return Table(headers=("line", "what is said of it", "seconds", "of the step"), rows=tuple(rows), words=2)


def _cells(line: Line, *, depth: int, step: float) -> tuple[str, ...]:
    name = (_SPACE * 3 * max(depth - 1, 0)) + line.name
    return (name, line.note, format_seconds(line.seconds), format_percent(line.seconds / step) if step else "N/A")
