"""Step time against peak memory of the ranked plans: every point a link to its plan, those nothing beats marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from meshwright.report import svg
from meshwright.report.explain import signed_seconds
from meshwright.report.figure import Figure, Table
from meshwright.search import Candidate
from meshwright.spec.units import format_bytes, format_seconds

_UNITS = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_NEAR = 1.5
_WIDE = 8.0
_ALIKE = 0.01
_ASIDE, _RADIUS = 19, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Across:
    """Where a step time lies from left to right, as a fraction; of its logarithm where times differ much.

    Where labels of times would be alike they are told as what is more than `fastest`.
    """

    scale: svg.Scale
    fastest: float
    is_log: bool
    is_close: bool

    @classmethod
    def over(cls, steps: Sequence[float]) -> _Across:
        is_log = max(steps) > _WIDE * min(steps)
        scale = svg.Scale.over((math.log10(step) if is_log else step for step in steps), margin=0.07)
        labels = [format_seconds(tick) for tick in scale.ticks(4)]
        return cls(scale=scale, fastest=min(steps), is_log=is_log, is_close=len(set(labels)) < len(labels))

    def __call__(self, seconds: float) -> float:
        return self.scale(math.log10(seconds) if self.is_log else seconds)

    @property
    def words(self) -> str:
        if self.is_log:
            return "a step, logarithmic"
        return f"how much longer a step is than {format_seconds(self.fastest)}" if self.is_close else "a step"

    def axis(self) -> str:
        if self.is_log:
            return svg.time_axis(self.scale, show=lambda value: format_seconds(10.0**value), zero=None)
        if self.is_close:
            scale = svg.Scale(low=self.scale.low - self.fastest, high=self.scale.high - self.fastest)
            return svg.time_axis(scale, show=signed_seconds)
        return svg.time_axis(self.scale, show=format_seconds)


def front(candidates: Sequence[Candidate]) -> frozenset[int]:
    """Indexes of the plans that no other beats in step time and in memory both (the Pareto front); equals all are."""
    order = sorted(
        range(len(candidates)), key=lambda index: (candidates[index].step_seconds, _bytes(candidates[index]))
    )
    found, least = set(), (0.0, float("inf"))
    for index in order:
        figures = (candidates[index].step_seconds, _bytes(candidates[index]))
        if figures[1] < least[1] or figures == least:
            found.add(index)
            least = figures
    return frozenset(found)


def scatter(candidates: Sequence[Candidate], *, chosen: int) -> Figure:
    """The plans by step time and peak memory, the front as a line through its points."""
    across = _Across.over([entry.step_seconds for entry in candidates])
    up = svg.Scale.over((_bytes(entry) for entry in candidates), margin=0.14)
    capacity = min(entry.capacity_bytes for entry in candidates)
    near = capacity - up.low <= _NEAR * (up.high - up.low)
    if near:
        up = svg.Scale(low=up.low, high=max(up.high, capacity + 0.03 * (capacity - up.low)))
    best = front(candidates)
    ticks = _memory_ticks(up)
    lines = [_across(up(value), "grid") for value in ticks]
    lines += [_across(up(capacity), "limit")] if near else []
    line = sorted((candidates[index].step_seconds, _bytes(candidates[index])) for index in best)
    lines.append(svg.path([(across(x), up(y)) for x, y in line], class_="line s-4 dashed"))
    places = [(across(entry.step_seconds), up(_bytes(entry))) for entry in candidates]
    points = "".join(
        _point(index, entry, places, on_front=index in best, chosen=index == chosen)
        for index, entry in enumerate(candidates)
    )
    labels = "".join(
        f'<span style="bottom:{svg.percent(up(value))}">{escape(label)}</span>' for value, label in ticks.items()
    )
    picture = svg.stretched(*lines, label="step time against peak memory")
    body = (
        f'<div class="chart"><div class="yaxis" aria-hidden="true">{labels}</div>'
        f'<div class="plot points">{picture}{points}</div>{across.axis()}</div>'
    )
    few = "" if near else f" All are far below the {format_bytes(capacity)} that a device has."
    return Figure(
        title="Step time and memory",
        caption=f"Across: {across.words}; up: the peak of memory. Nearer the lower left is better.{few}",
        body=body,
        table=_table(candidates, best),
        legend=(
            ("front", "no plan here beats it in both"),
            ("beaten", "another beats it"),
            *((("capacity", "what a device may use"),) if near else ()),
        ),
    )


def _memory_ticks(scale: svg.Scale) -> dict[float, str]:
    """Round numbers of the largest unit that the scale reaches, each with a label of its own: `43.5 GiB`."""
    unit, name = next((size, name) for size, name in _UNITS if scale.high >= size or size == 1.0)
    values = svg.Scale(low=scale.low / unit, high=scale.high / unit).ticks(4)
    step = min((after - before for before, after in pairwise(values)), default=1.0)
    digits = next(digits for digits in range(12) if abs(round(step, digits) - step) < 1e-6 * step)
    return {value * unit: f"{value:,.{digits}f} {name}" for value in values}


def _bytes(entry: Candidate) -> float:
    return entry.peak_bytes


def _across(fraction: float, kind: str) -> str:
    y = f"{1000 * (1 - fraction):.1f}"
    return svg.element("line", class_=kind, x1=0, x2=1000, y1=y, y2=y)


def _point(index: int, entry: Candidate, places: Sequence[tuple[float, float]], *, on_front: bool, chosen: bool) -> str:
    """A link at its place; where others before it are at the same place, beside them."""
    x, y = places[index]
    alike = sum(abs(left - x) + abs(bottom - y) < _ALIKE for left, bottom in places[:index])
    said = (
        f"plan {index + 1}{', chosen' if chosen else ''}: step {format_seconds(entry.step_seconds)}, "
        f"peak memory {format_bytes(entry.peak_bytes)} of {format_bytes(entry.capacity_bytes)}. {entry.plan.describe()}"
    )
    aside = f";margin-left:{_ASIDE * alike - _RADIUS}px" if alike else ""
    place = f"left:{svg.percent(x)};bottom:{svg.percent(y)}{aside}"
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
