"""SVG written in Python: elements, axes and ticks. Places across are percentages, so a chart fits any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

FARTHEST = 1e150  # what no figure reaches, nor its square infinity
NEAREST = 1e-150  # what no figures differ by, nor is its share nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A linear map of [low, high] to [0, 1]; low and high differ."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, zero: bool = False, margin: float = 0.04) -> Scale:
        """The scale that shows all `values` but those beyond FARTHEST, with a margin; from 0 when `zero`. Around values
        that do not differ there always is one."""
        finite = [value for value in values if abs(value) < FARTHEST]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if zero:
            low = min(0.0, low)
        room = high - low
        if room <= NEAREST:
            room, margin = max(abs(high), abs(low)), margin or 0.5
            room = room if room > NEAREST else 1.0
        return cls(low=low if zero else low - margin * room, high=high + margin * room)

    def __call__(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """Round values inside the scale: as near to `count` of them as round steps allow, and one more at the most."""
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / max(count, 1)))
        found = [self._at(factor * power) for factor in (10.0, 5.0, 2.5, 2.0, 1.0)]
        return min((each for each in found if len(each) <= count + 1), key=lambda ticks: abs(len(ticks) - count))

    def _at(self, step: float) -> list[float]:
        """The multiples of `step` inside the scale."""
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        found = (number * step for number in range(first, last + 1))
        return [tick for tick in found if -1e-9 <= self(tick) <= 1.0 + 1e-9]


def element(name: str, *children: str, title: str = "", **attributes: object) -> str:
    """One element; underscores at the end of names go, inside become hyphens; `title` is what hovering shows."""
    inside = (f"<title>{escape(title)}</title>" if title else "") + "".join(children)
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{pairs}>{inside}</{name}>" if inside else f"<{name}{pairs}/>"


def text(content: str, *, class_: str, x: str, y: str) -> str:
    return element("text", escape(content), class_=class_, x=x, y=y)


def percent(fraction: float) -> str:
    """`12.34%`, as short as it can be."""
    return f"{100.0 * fraction:.2f}".rstrip("0").rstrip(".") + "%"


def bar(
    *, start: float, width: float, top: float, height: float, kind: str, title: str = "", smallest: float = 0.0008
) -> str:
    """A rectangle of colour `kind` from `start` over `width` (fractions of the chart), at least `smallest` wide."""
    return element(
        "rect",
        title=title,
        class_=f"{kind} tip" if title else kind,
        x=percent(start),
        y=f"{top:g}",
        width=percent(max(width, smallest)),
        height=f"{height:g}",
    )


def stripes(pieces: Sequence[Sequence[float]], *, top: float, height: float, kind: str) -> str:
    """Many rectangles of one colour and height as one shape; each piece is its left and right end, as fractions."""
    steps = "".join(
        f"M{10000 * left:.0f} 0h{max(10000 * (right - left), 1):.0f}v1H{10000 * left:.0f}z" for left, right in pieces
    )
    shape = element("path", d=steps, class_=kind)
    box = {"viewBox": "0 0 10000 1", "preserveAspectRatio": "none", "width": "100%", "x": "0"}
    return element("svg", shape, y=f"{top:g}", height=f"{height:g}", **box)


def drawing(*parts: str, height: float, label: str) -> str:
    """The whole chart: as wide as its place, `height` pixels high, named for those who do not see it."""
    return element("svg", *parts, width="100%", height=f"{height:g}", role="img", aria_label=label)


def stretched(*parts: str, label: str) -> str:
    """A chart in a box of 1000 by 1000 that fills its place whatever its form; strokes keep their width."""
    return element(
        "svg", *parts, viewBox="0 0 1000 1000", preserveAspectRatio="none", role="img", aria_label=label, class_="fill"
    )


def path(points: Sequence[tuple[float, float]], *, class_: str) -> str:
    """A line through points given as fractions of the box, (0, 0) at the lower left."""
    steps = " ".join(f"{1000 * x:.4g},{1000 * (1 - y):.4g}" for x, y in points)
    return element("polyline", points=steps, fill="none", vector_effect="non-scaling-stroke", class_=class_)


def thinned(points: Sequence[tuple[float, float]], *, most: int) -> list[tuple[float, float]]:
    """At most `most` points: the lowest and the highest of every stretch, the first and last kept."""
    if len(points) <= most:
        return list(points)
    size = len(points) / max(most // 2 - 1, 1)
    kept = {0, len(points) - 1}
    for number in range(max(most // 2 - 1, 1)):
        stretch = range(int(number * size), min(int((number + 1) * size), len(points)))
        if stretch:
            kept.add(min(stretch, key=lambda index: points[index][1]))
            kept.add(max(stretch, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(kept)]


def time_axis(scale: Scale, *, show: Callable[[float], str], count: int = 4, zero: str | None = "0") -> str:
    """HTML labels under a chart at round values of its horizontal scale; `zero` is that of 0, None asks `show`."""
    spans = []
    for value in scale.ticks(count):
        place = scale(value)
        edge = ' style="left:0;transform:none"' if place < 0.02 else f' style="left:{percent(place)}"'
        if place > 0.97:
            edge = ' style="right:0;left:auto;transform:none"'
        spans.append(f"<span{edge}>{escape(show(value) if value or zero is None else zero)}</span>")
    return f'<div class="xaxis" aria-hidden="true">{"".join(spans)}</div>'
