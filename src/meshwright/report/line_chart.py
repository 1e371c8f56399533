"""Curves over steps or tokens: loss and throughput, of one run or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import accumulate

from meshwright.report import svg
from meshwright.report.figure import Figure, Table

_MOST_POINTS = 300
_MOST_HOVERS = 80
_MOST_ROWS = 60
_SMOOTH_FROM = 60


class Look(StrEnum):
    """How a curve is drawn: a line, a thin one behind another, a dashed one, dots, or dots on a line."""

    LINE = "line"
    FAINT = "faint"
    DASHED = "dashed"
    DOTS = "dots"
    BEADS = "beads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points (x, y) in order of x, in the colour of CSS class `kind`. FAINT and DOTS are not in the legend."""

    name: str
    kind: str
    points: tuple[tuple[float, float], ...]
    look: Look = Look.LINE


def line_chart(
    *,
    title: str,
    caption: str,
    curves: Sequence[Curve],
    x_name: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    zero: bool = False,
) -> Figure | None:
    """A chart of all curves on the same axes, the vertical one from 0 when `zero`; None when none has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    across = svg.Scale.over((x for curve in curves for x, _ in curve.points), margin=0.0)
    up = svg.Scale.over((y for curve in curves for _, y in curve.points), zero=zero, margin=0.08)
    ticks = up.ticks(4)
    grid = "".join(
        svg.element(
            "line", class_="grid", x1=0, x2=1000, y1=f"{1000 * (1 - up(value)):.1f}", y2=f"{1000 * (1 - up(value)):.1f}"
        )
        for value in ticks
    )
    lines = "".join(_line(curve, across, up) for curve in curves if curve.look is not Look.DOTS)
    dots = "".join(_dots(curve, across, up, x_name=x_name, show_x=show_x, show_y=show_y) for curve in curves)
    hovers = _hovers(curves, across, x_name=x_name, show_x=show_x, show_y=show_y)
    labels = "".join(f'<span style="bottom:{svg.percent(up(value))}">{escape(show_y(value))}</span>' for value in ticks)
    plot = f'<div class="plot">{svg.stretched(grid, lines, hovers, label=title)}{dots}</div>'
    axis = svg.time_axis(across, show=show_x, count=4)
    body = f'<div class="chart"><div class="yaxis" aria-hidden="true">{labels}</div>{plot}{axis}</div>'
    legend = tuple(
        (f"{curve.kind}{' dashed' if curve.look is Look.DASHED else ''}", curve.name)
        for curve in curves
        if curve.look not in (Look.FAINT, Look.DOTS)
    )
    return Figure(
        title=title,
        caption=caption,
        body=body,
        table=_table(curves, x_name=x_name, show_x=show_x, show_y=show_y),
        legend=legend,
    )


def smoothed(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Each point's mean with its neighbours, a thirtieth of all, fewer at the ends; few points are kept."""
    if len(points) < _SMOOTH_FROM:
        return tuple(points)
    sums = [0.0, *accumulate(y for _, y in points)]
    reach = len(points) // 60
    found = []
    for index, (x, _) in enumerate(points):
        side = min(reach, index, len(points) - 1 - index)
        found.append((x, (sums[index + side + 1] - sums[index - side]) / (2 * side + 1)))
    return tuple(found)


def _place(point: tuple[float, float], across: svg.Scale, up: svg.Scale) -> tuple[float, float]:
    return across(point[0]), min(1.0, max(0.0, up(point[1])))


def _line(curve: Curve, across: svg.Scale, up: svg.Scale) -> str:
    points = [_place(point, across, up) for point in svg.thinned(curve.points, most=_MOST_POINTS)]
    return svg.path(points, class_=f"line {curve.kind} {curve.look.value}")


def _dots(
    curve: Curve,
    across: svg.Scale,
    up: svg.Scale,
    *,
    x_name: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
) -> str:
    if curve.look not in (Look.DOTS, Look.BEADS):
        return ""
    spans = []
    for x, y in svg.thinned(curve.points, most=_MOST_HOVERS):
        left, bottom = _place((x, y), across, up)
        said = escape(f"{curve.name} {show_y(y)} at {x_name} {show_x(x)}")
        style = f"left:{svg.percent(left)};bottom:{svg.percent(bottom)}"
        spans.append(f'<i class="dot {curve.kind} tip" style="{style}" title="{said}"></i>')
    return "".join(spans)


def _hovers(
    curves: Sequence[Curve],
    across: svg.Scale,
    *,
    x_name: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
) -> str:
    """Invisible columns whose titles tell every line's value there."""
    solid = [curve for curve in curves if curve.look is Look.LINE]
    if not solid:
        return ""
    points = solid[0].points
    step = max(1, -(-len(points) // _MOST_HOVERS))
    chosen = points[::step]
    columns = []
    for index, (x, _) in enumerate(chosen):
        left = across(chosen[index - 1][0] / 2 + x / 2) if index else 0.0
        right = across(chosen[index + 1][0] / 2 + x / 2) if index + 1 < len(chosen) else 1.0
        said = "; ".join(f"{curve.name} {show_y(_nearest(curve, x))}" for curve in solid)
        columns.append(
            svg.element(
                "rect",
                title=f"{x_name} {show_x(x)}: {said}",
                class_="hover tip",
                x=f"{1000 * left:.1f}",
                y=0,
                width=f"{1000 * max(right - left, 0.001):.1f}",
                height=1000,
            )
        )
    return "".join(columns)


def _nearest(curve: Curve, x: float) -> float:
    return min(curve.points, key=lambda point: abs(point[0] - x))[1]


def _table(
    curves: Sequence[Curve], *, x_name: str, show_x: Callable[[float], str], show_y: Callable[[float], str]
) -> Table:
    shown = [curve for curve in curves if curve.look is not Look.FAINT]
    columns = [dict(curve.points) for curve in shown]
    places = sorted({x for column in columns for x in column})
    if len(places) > _MOST_ROWS:
        dots = {x for curve in shown if curve.look in (Look.DOTS, Look.BEADS) for x, _ in curve.points}
        step = -(-len(places) // _MOST_ROWS)
        places = sorted({*places[::step], places[-1], *list(dots)[:_MOST_ROWS]})
    rows = tuple((show_x(x), *(show_y(column[x]) if x in column else "" for column in columns)) for x in places)
    return Table(headers=(x_name, *(curve.name for curve in shown)), rows=rows, words=0)
