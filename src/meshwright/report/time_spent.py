"""What the time of a run went to: in lines, and as a bar with the cost of each interruption below it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from meshwright.report import svg
from meshwright.report.bars import bar_row
from meshwright.report.figure import Figure, Table, colour
from meshwright.spec.goodput import Goodput, Interruption, Spent
from meshwright.spec.units import LEAST_SHARE, format_percent, format_seconds

_TOLD = 5


def goodput_lines(goodput: Goodput) -> list[str]:
    """`time: 97 % useful of 3.2 h; ...`, then a line for each of the costliest interruptions."""
    rest = {kind: each for kind, each in _rest(goodput).items() if each >= LEAST_SHARE * goodput.wall_seconds}
    asleep = rest.pop(Spent.ASLEEP, 0.0)
    parts = ", ".join(f"{kind} {format_seconds(each)}" for kind, each in rest.items())
    whole = f"time: {format_percent(goodput.ettr)} of {format_seconds(goodput.held_seconds)} was useful (ETTR)"
    beside = f"and {format_seconds(asleep)} asleep beside them" if asleep else ""
    lines = ["; ".join(part for part in (whole, parts, beside) if part)]
    costly = sorted(goodput.interruptions, key=lambda each: -each.lost_seconds)
    lines += [f"  {interruption_line(each)}" for each in costly[:_TOLD]]
    if len(costly) > _TOLD:
        lost = sum(each.lost_seconds for each in costly[_TOLD:])
        lines.append(f"  {len(costly) - _TOLD} more interruptions: {format_seconds(lost)} lost")
    return lines


def interruption_line(each: Interruption) -> str:
    """`9.1 s lost, on from step 120: rank 1 was killed (signal 9); undone steps 4.1 s (40), restarts 5 s`.

    What was wanted is not called lost.
    """
    kinds = (kind for kind, seconds in each.seconds.items() if seconds or kind is Spent.UNDONE)
    parts = ", ".join(_part(each, kind) for kind in kinds)
    word = "to go" if each.was_wanted else "lost,"
    told = f"{format_seconds(each.lost_seconds)} {word} on from step {each.step:,}: {each.why}"
    return f"{told}; {parts}" if parts else told


def goodput_figure(goodput: Goodput | None) -> Figure | None:
    """The whole run as one bar by kind, then each of its costliest interruptions, all to one scale; None without."""
    if goodput is None or goodput.wall_seconds <= 0:
        return None
    wall = goodput.wall_seconds
    shown = {kind: each for kind, each in _ordered(goodput.seconds).items() if each > 0}
    costly = sorted(goodput.interruptions, key=lambda each: -each.lost_seconds)[:_TOLD]
    rows = [bar_row("the run", _bar("the run", shown, wall), format_seconds(wall))]
    rows += [
        bar_row(
            f"on from step {each.step:,}",
            _bar(f"lost before step {each.step:,}", each.seconds, wall),
            f"{format_seconds(each.lost_seconds)} {'to go on' if each.was_wanted else 'lost'}",
        )
        for each in costly
    ]
    why = "".join(f"<li>{escape(interruption_line(each))}</li>" for each in costly)
    launches = f"{goodput.launches} launch{'' if goodput.launches == 1 else 'es'}"
    failures = f"{goodput.failures} failure{'' if goodput.failures == 1 else 's'}"
    return Figure(
        title="Where the run's time went",
        caption=(
            f"{format_percent(goodput.ettr)} of the time with machines was useful (ETTR): {goodput.steps:,} steps in "
            f"{launches} with {failures}. Below the run, what its costliest interruptions lost."
        ),
        body=f'<div class="bars single">{"".join(rows)}</div>' + (f'<ul class="why">{why}</ul>' if why else ""),
        table=Table(
            headers=("time", "seconds", "share"),
            rows=tuple((kind, format_seconds(each), format_percent(each / wall)) for kind, each in shown.items()),
        ),
        legend=tuple((colour(kind), kind) for kind in shown),
        wide=True,
    )


def _part(each: Interruption, kind: Spent) -> str:
    steps = f" ({each.undone_steps:,})" if kind is Spent.UNDONE else ""
    took = f" {format_seconds(each.seconds[kind])}" if each.seconds[kind] else ""
    return f"{kind}{took}{steps}"


def _rest(goodput: Goodput) -> dict[Spent, float]:
    """All but the useful, the largest first."""
    rest = {kind: each for kind, each in goodput.seconds.items() if kind is not Spent.USEFUL}
    return dict(sorted(rest.items(), key=lambda entry: -entry[1]))


def _ordered(seconds: Mapping[Spent, float]) -> dict[Spent, float]:
    return {kind: seconds[kind] for kind in Spent if kind in seconds}


def _bar(name: str, seconds: Mapping[Spent, float], whole: float) -> str:
    at, bars = 0.0, []
    for kind, each in _ordered(seconds).items():
        said = f"{name}, {kind}: {format_seconds(each)}"
        bars.append(svg.bar(start=at / whole, width=each / whole, top=0, height=14, kind=colour(kind), title=said))
        at += each
    return svg.drawing(*bars, height=14, label=f"{name}: {format_seconds(at)}")
