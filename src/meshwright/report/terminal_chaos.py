"""Runs under faults in a terminal: what each fault cost, whether anything was lost, and what a simulated fleet does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from meshwright.cost.faults import SHORT, Lost, Simulated
from meshwright.cost.foresee import Foreseen
from meshwright.report.terminal_parts import bullets, plain, table, title
from meshwright.report.time_spent import goodput_lines
from meshwright.spec.chaos import Chaos, Struck
from meshwright.spec.units import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_SHOWN_ROWS = 40
_SHOWN_CAUSES = 6
_SEEN = 0.0005  # of the time, under which a share is shown as nothing


def chaos(found: Chaos) -> Iterable[RenderableType]:
    """Every fault with what it cost, then what the run lost by all of them."""
    yield title(f"{_count(len(found.struck), 'fault')} in {found.run}, {_count(len(found.launches), 'launch')}")
    shown = found.struck[:_SHOWN_ROWS]
    yield _struck(shown)
    if len(found.struck) > _SHOWN_ROWS:
        yield plain(f"{len(found.struck) - _SHOWN_ROWS} more are in {found.run}/chaos.json")
    if any(each.words for each in shown):
        yield title("what the run said")
        yield from bullets(f"{each.fault}: {each.words}" for each in shown if each.words)
    yield title("what was lost")
    yield from bullets(verdicts(found))
    for line in goodput_lines(found.goodput)[:1] if found.goodput else ():
        yield plain(line)


def verdicts(found: Chaos) -> list[str]:
    """One line for each thing that has to hold: recoveries, data, the curve."""
    were = "was" if len(found.struck) == 1 else "were"
    lines = [f"{found.recovered} of {_count(len(found.struck), 'fault')} {were} recovered from"]
    lines += [f"NOT DONE: {fault}, whose moment never came" for fault in found.missed]
    if found.gave_up:
        lines.append(f"GIVEN UP: {found.gave_up}")
    lines += [f"NOT PROVEN: {problem}" for problem in found.problems]
    if not found.problems:
        lines.append(f"each of {found.read:,} sequences was read exactly once")
    if found.curve is None:
        return [*lines, "no run was there to compare the losses with"]
    curve = found.curve
    if curve.missing:
        lines.append(f"NOT EQUAL: {len(curve.missing)} steps are in one of the two runs alone")
    same = "the same bits as" if curve.worst == 0.0 else f"relatively at most {curve.worst:.1e} apart from"
    state = {True: "; the last state is, too", False: "; the last state is not the same bits", None: ""}
    verdict = "" if curve.is_equal else "NOT EQUAL: "
    told = state[curve.same_state] if curve.worst == 0.0 else ""
    return [*lines, f"{verdict}losses of {curve.steps:,} steps are {same} those of {curve.against}{told}"]


def _count(many: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{many:,} {noun if many == 1 else plural}"


def _struck(struck: Iterable[Struck]) -> Table:
    columns = [("fault", "left"), ("step", "right"), ("ended after", "right"), ("trained after", "right")]
    shown = table(columns=[*columns, ("steps again", "right")])
    for each in struck:
        shown.add_row(
            str(each.fault),
            f"{each.step:,}",
            "went on" if each.found_seconds is None else format_seconds(each.found_seconds),
            "NEVER" if each.back_seconds is None else format_seconds(each.back_seconds),
            f"{each.undone_steps:,}",
        )
    return shown


def foreseen(found: Foreseen) -> Iterable[RenderableType]:
    """The useful share of the time, where the rest goes, and what other intervals and spares would do."""
    advice = found.advice
    asked, best = advice.asked, advice.best_interval
    days = "1 day" if found.days == 1.0 else f"{found.days:g} days"
    yield title(f"{_count(found.devices, 'device')} for {days}, simulated {_count(asked.seeds, 'time')}")
    yield plain(
        f"{format_percent(asked.ettr)} of the time is useful (ETTR; nine of ten runs {format_percent(asked.low)} to "
        f"{format_percent(asked.high)}), with {_count(advice.taken, 'spare node')} and a checkpoint every "
        f"{format_seconds(asked.saves.every_seconds)}"
    )
    yield plain(_failures(asked, between=found.seconds_between_failures))
    yield plain(f"by Daly's formula {format_percent(found.closed_form)}; failures of mix {found.mix}: {found.source}")
    yield title("where the rest goes")
    yield _lost(asked)
    yield from _tried(
        advice.intervals,
        name="interval",
        value=lambda one: format_seconds(one.saves.every_seconds),
        heading=f"checkpoints every so often; the best is {format_seconds(best.saves.every_seconds)}",
    )
    yield from _tried(
        advice.spares,
        name="spares",
        value=lambda one: f"{one.fleet.spares:,}",
        heading=f"spare nodes; the best of what is paid for are {advice.best_spares.fleet.spares:,}",
    )
    yield title("assumed")
    yield from bullets(found.assumed)


def _lost(one: Simulated) -> Table:
    shown = table(columns=[("lost to", "left"), ("of the time", "right"), ("brought about by", "left"), ("", "right")])
    causes = sorted(one.by_trouble.items(), key=lambda entry: -entry[1])[:_SHOWN_CAUSES]
    kinds = list(Lost)
    for place in range(max(len(kinds), len(causes))):
        left = (kinds[place].value, format_percent(one.lost[kinds[place]])) if place < len(kinds) else ("", "")
        name, share = causes[place] if place < len(causes) else ("", 0.0)
        shown.add_row(*left, name, format_percent(share) if name else "")
    return shown


def _failures(one: Simulated, *, between: float) -> str:
    """How often something fails, and how many failures a run has had, which are fewer where it waits for nodes."""
    many = f"{one.failures:,.0f}" if one.failures >= 10 else f"{one.failures:.2g}"
    had = f"{many} failures in a run on the mean" if one.failures else f"none of {one.seeds} runs had one"
    waiting = one.lost[Lost.WAITING]
    idle = f"; none while nodes are waited for, {format_percent(waiting)} of the time" if waiting >= SHORT else ""
    return f"a failure every {format_seconds(between)} on the mean: {had}{idle}"


def _tried(
    tried: Sequence[Simulated], *, name: str, value: Callable[[Simulated], str], heading: str
) -> Iterable[RenderableType]:
    """What each that was tried comes to; in a line where all of them show the same."""
    rows = []
    for one in tried:
        between = f"{format_percent(one.low)} to {format_percent(one.high)}"
        rows.append((value(one), format_percent(one.ettr), between, format_percent(one.of_paid)))
    if len(rows) > 1 and len({row[1:] for row in rows}) == 1:
        of_time = f"{rows[0][1]} of the time is useful"
        none = "" if tried[0].ettr >= _SEEN else ": failures leave no time for anything but restarts and waiting"
        yield title(f"{name}: {rows[0][0]} to {rows[-1][0]} were tried and come to the same")
        yield plain(f"{of_time} with each of them{none}")
        return
    yield title(heading)
    shown = table(columns=[(name, "right"), ("useful", "right"), ("nine of ten", "left"), ("of all paid for", "right")])
    for row in rows:
        shown.add_row(*row)
    yield shown
