"""From ideal compute to the step: what each line of a prediction adds, and how sure the sum is."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.report import svg
from meshwright.report.bars import bar_row, step_bar
from meshwright.report.figure import Figure, Table
from meshwright.spec.report import Line, LineName, Report
from meshwright.spec.units import format_percent, format_seconds

IDEAL, BELOW = "ideal compute at peak", "kernels below peak"
_SHOWN = 5e-4
_SPACE = "\N{NO-BREAK SPACE}"
_COMPUTE = (LineName.FORWARD, LineName.BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`seconds` that `name` adds to the step."""

    name: str
    seconds: float
    note: str = ""


def losses(report: Report) -> tuple[Loss, ...]:
    """Terms that sum to the step: the model's FLOPs at the peak of all devices, then whatever is slower than that.

    Where the peak is not known, or a forward counts fewer FLOPs than the model's formula, compute is forward and
    backward as predicted.
    """
    compute = sum(line.seconds for line in report.step.lines if line.name in _COMPUTE)
    ideal = report.model_flops / report.peak_flops if report.peak_flops else 0.0
    if 0.0 < ideal <= compute:
        first = [
            Loss(name=IDEAL, seconds=ideal, note="FLOPs of the model at the peak of all devices in use"),
            Loss(name=BELOW, seconds=compute - ideal, note="forward and backward slower than that"),
        ]
        rest = [line for line in report.step.lines if line.name not in _COMPUTE]
    else:
        first, rest = [], list(report.step.lines)
    return (*first, *(Loss(name=line.name, seconds=line.seconds, note=line.note) for line in rest))


def losses_figure(report: Report) -> Figure:
    """The terms as bars, each beginning where the one before ends, then the step and its band."""
    step, terms = report.step_seconds, losses(report)
    low, high = report.error_band
    longest = max(step * max(high, 1.0), sum(max(term.seconds, 0.0) for term in terms)) or 1.0
    rows, begun = [], 0.0
    for term in terms:
        if abs(term.seconds) > _SHOWN * step:
            drawn = step_bar("predicted", term.name, term.seconds, begun, longest)
            rows.append(bar_row(term.name, drawn, format_seconds(term.seconds)))
        begun += term.seconds
    whole = step_bar("predicted", LineName.STEP, step, 0.0, longest)
    rows.append(bar_row("step", whole, format_seconds(step), extra=" total"))
    if high > low:
        ends = " to ".join(format_seconds(end * step).replace(" ", _SPACE) for end in (low, high))
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
