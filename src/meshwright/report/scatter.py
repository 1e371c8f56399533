"""Step time against peak memory of the ranked plans: every point a link to its plan, those nothing beats marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.report import svg
from meshwright.report.figure import Figure, Table
from meshwright.search import Candidate
from meshwright.spec.units import format_bytes, format_seconds

_NEAR = 1.5
_WIDE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Across:
    """Where a step time lies from left to right, as a fraction; of its logarithm where times differ much."""

    scale: svg.Scale
    is_log: bool

    def __call__(self, seconds: float) -> float:
        return self.scale(math.log10(seconds) if self.is_log else seconds)

    def axis(self) -> str:
        if self.is_log:
            return svg.time_axis(self.scale, show=lambda value: format_seconds(10.0**value), zero=None)
        return svg.time_axis(self.scale, show=format_seconds)


def front(candidates: Sequence[Candidate]) -> frozenset[int]:
    """Indexes of the plans that no other beats in step time and in memory both (the Pareto front)."""
    order = sorted(
        range(len(candidates)), key=lambda index: (candidates[index].step_seconds, _bytes(candidates[index]))
    )
    found, least = set(), float("inf")
    for index in order:
        if _bytes(candidates[index]) < least:
            found.add(index)
            least = _bytes(candidates[index])
    return frozenset(found)


def scatter(candidates: Sequence[Candidate], *, chosen: int) -> Figure:
    """The plans by step time and peak memory, the front as a line through its points."""
    steps = [entry.step_seconds for entry in candidates]
    is_wide = max(steps) > _WIDE * min(steps)
    across = _Across(
        scale=svg.Scale.over((math.log10(step) if is_wide else step for step in steps), margin=0.07), is_log=is_wide
    )
    up = svg.Scale.over((_bytes(entry) for entry in candidates), margin=0.14)
    capacity = min(entry.capacity_bytes for entry in candidates)
    near = capacity - up.low <= _NEAR * (up.high - up.low)
    if near:
        up = svg.Scale(low=up.low, high=max(up.high, capacity + 0.03 * (capacity - up.low)))
    best = front(candidates)
    ticks = up.ticks(4)
    lines = [_across(up(value), "grid") for value in ticks]
    lines += [_across(up(capacity), "limit")] if near else []
    line = sorted((candidates[index].step_seconds, _bytes(candidates[index])) for index in best)
    lines.append(svg.path([(across(x), up(y)) for x, y in line], class_="line s-4 dashed"))
    points = "".join(
        _point(index, entry, across, up, on_front=index in best, chosen=index == chosen)
        for index, entry in enumerate(candidates)
    )
    labels = "".join(
        f'<span style="bottom:{svg.percent(up(value))}">{escape(format_bytes(value))}</span>' for value in ticks
    )
    picture = svg.stretched(*lines, label="step time against peak memory")
    body = (
        f'<div class="chart"><div class="yaxis" aria-hidden="true">{labels}</div>'
        f'<div class="plot points">{picture}{points}</div>{across.axis()}</div>'
    )
    kind = ", logarithmic" if is_wide else ""
    few = "" if near else f" All are far below the {format_bytes(capacity)} that a device has."
    return Figure(
        title="Step time and memory",
        caption=f"Across: a step{kind}; up: the peak of memory. Nearer the lower left is better.{few}",
        body=body,
        table=_table(candidates, best),
        legend=(
            ("front", "no plan here beats it in both"),
            ("beaten", "another is faster and smaller"),
            *((("capacity", "what a device may use"),) if near else ()),
        ),
    )


def _bytes(entry: Candidate) -> float:
    return entry.peak_bytes


def _across(fraction: float, kind: str) -> str:
    y = f"{1000 * (1 - fraction):.1f}"
    return svg.element("line", class_=kind, x1=0, x2=1000, y1=y, y2=y)


def _point(index: int, entry: Candidate, across: _Across, up: svg.Scale, *, on_front: bool, chosen: bool) -> str:
    said = (
        f"plan {index + 1}{', chosen' if chosen else ''}: step {format_seconds(entry.step_seconds)}, "
        f"peak memory {format_bytes(entry.peak_bytes)} of {format_bytes(entry.capacity_bytes)}. {entry.plan.describe()}"
    )
    place = f"left:{svg.percent(across(entry.step_seconds))};bottom:{svg.percent(up(_bytes(entry)))}"
    kind = "point tip front" if on_front else "point tip"
    return (
        f'<a class="{kind}" href="#plan-{index + 1}" data-plan="{index + 1}" style="{place}" '
        f'data-tip="{escape(said)}" aria-label="{escape(said)}"><span>{index + 1}</span></a>'
    )


def _table(candidates: Sequence[Candidate], best: frozenset[int]) -> Table:
    rows = tuple(
        (
            f"plan {index + 1}",
            "yes" if index in best else "no",
            format_seconds(entry.step_seconds),
            format_bytes(entry.peak_bytes),
            format_bytes(entry.free_bytes),
        )
        for index, entry in enumerate(candidates)
    )
    return Table(headers=("plan", "on the front", "step", "peak memory", "free"), rows=rows, words=2)
