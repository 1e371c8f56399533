"""Loss and throughput over a run, or over several runs by tokens."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.report.figure import Figure
from meshwright.report.line_chart import Curve, Look, line_chart, smoothed
from meshwright.report.run_files import Row, RunFiles
from meshwright.spec.units import format_count

SERIES = 6


def loss_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Training and validation loss; of several runs, training smoothed, validation as dots."""
    if len(runs) == 1:
        return _one_loss(runs[0])
    curves = []
    for index, files in enumerate(runs):
        kind = f"s-{index % SERIES}"
        curves.append(Curve(name=files.name, kind=kind, points=smoothed(_points(files.steps, "tokens", "loss"))))
        held = _points(files.evaluations, "tokens", "validation_loss")
        curves.append(Curve(name=f"{files.name}, validation", kind=kind, points=held, look=Look.DOTS))
    return line_chart(
        title="Loss",
        caption="Cross entropy in nats a token by tokens trained. Lines: training, smoothed; dots: validation.",
        curves=curves,
        x_name="tokens",
        show_x=format_count,
        show_y=_loss,
    )


def speed_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Tokens per second by step, with the prediction as a dashed line where there is one run."""
    curves = []
    for index, files in enumerate(runs):
        points = _points(files.steps, "step", "tokens_per_second")
        name = files.name if len(runs) > 1 else "measured"
        curves.append(Curve(name=name, kind=f"s-{index % SERIES}", points=points))
        if len(runs) == 1 and files.predicted and points:
            speed = files.predicted.tokens_per_second
            ends = tuple(dict.fromkeys(((points[0][0], speed), (points[-1][0], speed))))
            curves.append(Curve(name="predicted", kind="s-4", points=ends, look=Look.DASHED))
    return line_chart(
        title="Throughput",
        caption="Tokens per second of all devices together, by step.",
        curves=curves,
        x_name="step",
        show_x=_step,
        show_y=_speed,
        zero=True,
    )


def _one_loss(files: RunFiles) -> Figure | None:
    raw = _points(files.steps, "step", "loss")
    mean = smoothed(raw)
    held = _points(files.evaluations, "step", "validation_loss")
    curves = [
        Curve(name="training", kind="s-0", points=raw, look=Look.FAINT if mean != raw else Look.LINE),
        Curve(name="training, smoothed", kind="s-0", points=mean if mean != raw else ()),
        Curve(name="validation", kind="s-1", points=held, look=Look.BEADS),
    ]
    return line_chart(
        title="Loss",
        caption="Cross entropy in nats a token, by step.",
        curves=curves,
        x_name="step",
        show_x=_step,
        show_y=_loss,
    )


def _points(rows: Sequence[Row], x: str, y: str) -> tuple[tuple[float, float], ...]:
    """(x, y) of every row that has both, one a place: the last where a resumed run wrote a step twice."""
    found = {
        row[x]: row[y] for row in rows if isinstance(row.get(x), (int, float)) and isinstance(row.get(y), (int, float))
    }
    return tuple(sorted((float(place), float(value)) for place, value in found.items()))


def _loss(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _step(value: float) -> str:
    return f"{value:,.0f}"


def _speed(value: float) -> str:
    return format_count(value) if value >= 1e4 else f"{value:,.0f}"
