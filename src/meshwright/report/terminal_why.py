"""Explanations on the terminal: why not, headroom, sensitivity, sweeps, and two plans side by
side; from 80 columns up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.report.compare import Comparison, Pair
from meshwright.report.explain import signed_bytes, signed_seconds
from meshwright.report.rows import layout_words, setting_words
from meshwright.report.terminal_parts import bullets, plain, table, title
from meshwright.search.constraints import Value
from meshwright.search.headroom import Headroom
from meshwright.search.sensitivity import Effect, Sensitivity
from meshwright.search.settings import words
from meshwright.search.sweep import Move, Point, Sweep
from meshwright.search.why_not import WhyNot, headline
from meshwright.spec.job import Objective
from meshwright.spec.report import Gap
from meshwright.spec.units import (
    LEAST_SHARE,
    MANIFOLD,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    format_times,
)

Show = Callable[[float], str]


def why_not(answer: WhyNot) -> Group:
    """The answer in sentences and, where a plan with the settings can be priced, its step against the chosen one."""
    parts: list[RenderableType] = [title(headline(answer)), *bullets(answer.sentences)]
    if answer.plan is not None and answer.changed is not None:
        parts.append(Padding(plain(f"it differs in: {changes(answer.changed)}"), (0, 0, 0, 1), expand=False))
    if answer.gaps and answer.plan is not None:
        parts.append(_gaps(answer.gaps))
    return Group(*parts)


def _gaps(gaps: tuple[Gap, ...]) -> Table:
    rows = table(columns=[("line", "left"), ("chosen", "right"), ("with these", "right"), ("difference", "right")])
    step = gaps[0]
    for gap in gaps[1:]:
        if abs(gap.seconds) >= LEAST_SHARE * step.predicted:
            rows.add_row(gap.name, seconds(gap.predicted), seconds(gap.measured), signed(gap.seconds))
    rows.add_section()
    cells = seconds(step.predicted), seconds(step.measured), signed(step.seconds)
    rows.add_row("step", *cells, style="bold")
    return rows


def headroom(found: Headroom) -> Group:
    """What lifting each limit would give, the most first."""
    rows = table(columns=[("limit", "left"), ("tokens/s", "right"), ("gain", "right"), ("the best plan then", "left")])
    for limit in found.limits:
        then = changes(limit.changed) or "the same"
        rows.add_row(limit.words, format_count(limit.tokens_per_second), _change(limit.gain), then)
    return Group(title("what holds it back"), plain(found.sentence), rows)


def sensitivity(found: Sensitivity) -> Group:
    """Each figure's effect on the step of the chosen plan and of the best plan there, the largest first."""
    rows = table(
        columns=[
            ("figure", "left"),
            ("by", "right"),
            ("this plan", "right"),
            ("best plan", "right"),
            ("the decision", "left"),
        ]
    )
    for effect in found.effects:
        rows.add_row(
            effect.figure,
            f"{effect.factor - 1.0:+.0%}".replace("%", " %"),
            _change(effect.change),
            _change(effect.best_change),
            _decided(effect),
        )
    head = title(f"sensitivity of the step of {format_seconds(found.step_seconds)}")
    return Group(head, rows)


def _decided(effect: Effect) -> str:
    return f"flips: {changes(effect.changed)}" if effect.flips else "stands"


def sweep(found: Sweep) -> Group:
    """A row for every value, or pair of values: the best plan there, its figures, and where the decision flips."""
    scaled = any(point.scaling is not None for point in found.points)
    columns = [*((path.rsplit(".", 1)[-1], "right") for path in found.paths), ("best plan", "left"), ("step", "right")]
    by_time = found.objective is not Objective.MEMORY
    columns += [("ranked by", "right")] if by_time else []
    columns += [("tokens/s", "right"), ("MFU", "right"), *([("scaling", "right")] if scaled else [])]
    rows = table(columns=columns)
    told = []
    flips = 0
    for point in found.points:
        if point.best is None:
            rows.add_row(*point.labels, "no plan", *["-"] * (3 + scaled + by_time), style="red")
            told += [f"{_at(found, point)}: {problem}" for problem in point.problems[:1]]
            continue
        mark = "* " if point.flips else ""
        flips += point.flips
        plan = f"{mark}{layout_words(point.best.plan)}\n{setting_words(point.best.plan)}"
        figures = _figures(point, by_time=by_time, scaled=scaled)
        rows.add_row(*point.labels, plan, *figures, style="yellow" if point.flips else "")
        told += [_moved(found, point, move) for move in point.moves if move.flips]
    parts: list[RenderableType] = [title(f"what if: {' x '.join(found.paths)}"), rows]
    same = (
        "the decision is the same throughout"
        if any(point.best for point in found.points)
        else "nowhere is there a plan"
    )
    ranked = f". Ranked by {found.ordered_by}." if found.ordered_by else ""
    parts.append(plain(("* the decision flips here" if flips else same) + ranked))
    return Group(*parts, *bullets(told))


def _at(found: Sweep, point: Point) -> str:
    names = (path.rsplit(".", 1)[-1] for path in found.paths)
    return ", ".join(f"{name} {label}" for name, label in zip(names, point.labels, strict=True))


def _moved(found: Sweep, point: Point, move: Move) -> str:
    """What changes on the way to the point, and along which path where two are crossed."""
    start = f", from {move.path.rsplit('.', 1)[-1]} {move.before}" if len(found.paths) > 1 else ""
    return f"{_at(found, point)}{start}: {changes(move.changed)}{_kept(found, move)}"


def _kept(found: Sweep, move: Move) -> str:
    """What the plan before would cost here; nothing where other devices leave it no meaning."""
    if move.kept is not None:
        return f"; the plan before would take {format_percent(move.kept)} longer here"
    alike = len({other.devices for other in found.points}) == 1
    return "; the plan before is not legal or does not fit here" if alike else ""


def _figures(point: Point, *, by_time: bool, scaled: bool) -> Iterable[str]:
    best = point.best
    assert best is not None
    yield format_seconds(best.step_seconds)
    if by_time:
        yield "-" if best.expected_seconds is None else format_seconds(best.expected_seconds)
    yield format_count(best.tokens_per_second)
    yield "N/A" if best.mfu is None else format_percent(best.mfu)
    if scaled:
        yield "-" if point.scaling is None else format_percent(point.scaling)


def comparison(found: Comparison) -> Group:
    """The verdict, the settings that differ, the step and the memory of both."""
    one, other = found.one.name, found.other.name
    settings = table(columns=[("setting", "left"), (one, "left"), (other, "left")])
    for name, (ours, theirs) in found.settings.items():
        settings.add_row(name, ours, theirs)
    step = _pairs(found.step, one, other, show=seconds, sign=signed, what="where the step goes")
    memory = _pairs(found.memory, one, other, show=format_bytes, sign=signed_memory, what="memory at the peak")
    parts: list[RenderableType] = [plain(found.verdict, style="bold"), title(f"settings that differ ({found.origin})")]
    if found.loss_gap is not None:
        parts.insert(1, plain(f"Beside {one} the validation loss of {other} lies {found.loss_gap.words}."))
    parts.append(settings if found.settings else plain("none: the two plans are the same"))
    return Group(*parts, Text(), step, Text(), memory)


def _pairs(pairs: Iterable[Pair], one: str, other: str, *, show: Show, sign: Show, what: str) -> Table:
    rows = table(columns=[(what, "left"), (one, "right"), (other, "right"), ("difference", "right")])
    kept = list(pairs)
    total = Pair(name="sum", one=sum(pair.one for pair in kept), other=sum(pair.other for pair in kept))
    least = LEAST_SHARE * max(total.one, total.other)
    small = [pair for pair in kept if max(abs(pair.one), abs(pair.other)) < least]
    rest = Pair(name="the rest", one=sum(pair.one for pair in small), other=sum(pair.other for pair in small))
    for pair in [pair for pair in kept if pair not in small] + [rest] * (len(small) > 1) + small * (len(small) == 1):
        rows.add_row(pair.name, show(pair.one), show(pair.other), sign(pair.difference))
    rows.add_section()
    rows.add_row(total.name, show(total.one), show(total.other), sign(total.difference), style="bold")
    return rows


def changes(changed: Mapping[str, tuple[Value, Value]]) -> str:
    """`tensor 1 -> 2, zero2 -> zero3`."""
    return ", ".join(
        f"{words({column: before})} -> {after}"
        if column not in ("recompute", "zero", "sequence_parallel", "offload")
        else f"{words({column: before})} -> {words({column: after})}"
        for column, (before, after) in changed.items()
    )


def seconds(count: float) -> str:
    """`41.0 ms`; `0` where there is none."""
    return "0" if abs(count) < 1e-9 else format_seconds(count)


def signed(count: float) -> str:
    """`+41.0 ms`; `0` where nothing changes."""
    return "0" if abs(count) < 1e-9 else signed_seconds(count)


def signed_memory(count: float) -> str:
    """`-1.20 GiB`; `0` where nothing changes."""
    return "0" if abs(count) < 1 else signed_bytes(count)


def _change(fraction: float) -> str:
    if fraction > MANIFOLD:
        return format_times(1.0 + fraction)
    return "0" if abs(fraction) < LEAST_SHARE else f"{100.0 * fraction:+.1f} %"
