"""A schedule made to measure for the best plan: for its stages as uneven as they are, in the memory that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.cost.predict import predict
from meshwright.cost.workload import workload
from meshwright.schedule import planned
from meshwright.schedule.synthesize import Synthesis, synthesize
from meshwright.schedule.workload import Workload
from meshwright.search.check import check
from meshwright.search.refine import Entry, entry_order, entry_value
from meshwright.search.rules import Scope
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Objective
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.units import format_percent

WORTH = 0.01  # of what the objective minimises, that a table must save
CLOSE = 0.005  # to the bound, where a search ends
OPERATIONS = 600_000  # that are timed for whole backwards, and for split ones: some seconds
MOST_OPERATIONS = 100_000  # of a step, whose bound is told
MOST_TRIES = 300
FEWEST_TRIES = 20  # below which classic schedules alone are tried
ROOM = 0.85  # of a device, that a table may fill where the plan does not fill more: what is fuller fits less surely
_ROUNDS = 3  # of less memory, where a table holds more than was counted on
_SCOPES = frozenset({Scope.PLAN, Scope.RUNTIME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tailored:
    """The best that was made for a plan, in `words`, with the bound that no order of the same passes beats; `entry` is
    the plan with that table where it pays.
    """

    entry: Entry | None
    words: str


def tailor(best: Entry, objective: Objective) -> Tailored:
    """What a table of its own gains the best plan, or why it has none.

    The same wherever it runs: schedules are counted, not seconds. Backwards stay whole, or are split where the runtime
    splits those of the plan.
    """
    made, report = best
    operations = 3 * len(made.plan.stages) * made.plan.schedule.microbatches
    tries = min(MOST_TRIES, OPERATIONS // (operations * made.plan.schedule.chunks))
    if made.plan.pipeline == 1:
        return _none("the best plan has no pipeline")
    if operations > MOST_OPERATIONS:
        return _none(f"{operations:,} passes in halves are too many to try orders of")
    tries = tries if tries >= FEWEST_TRIES else 0
    refused = set(check(made, scopes=_SCOPES))
    limits = [max(held.total, ROOM * held.capacity) for held in report.memory]
    found = [_fitting(made, limits, splits=splits, tries=tries, refused=refused) for splits in (False, True)]
    kept = [each for each in found if each is not None]
    if not kept:
        return _none("what could be made is refused by rules, or does not fit")
    table, gap = min(kept, key=lambda each: entry_order(each[0], objective))
    saved = 1.0 - entry_value(table, objective) / entry_value(best, objective)
    words = _words(report, table[1], kind=made.plan.schedule.kind.value, gap=gap, pays=saved > WORTH)
    return Tailored(entry=table if saved > WORTH else None, words=words)


def _none(why: str) -> Tailored:
    return Tailored(entry=None, words=f"no table was made: {why}")


def _fitting(
    made: Design, limits: Sequence[float], *, splits: bool, tries: int, refused: set[Problem]
) -> tuple[Entry, float] | None:
    """The design with the best table found that fits, and its gap; None where none fits, or rules refuse it."""
    try:
        work = workload(made, splits=splits, limits=limits)
        for _ in range(_ROUNDS):
            if work is None:
                return None
            found = synthesize(work, tries=tries, limit_seconds=float("inf"), close=CLOSE)
            design = _with(made, found, splits=splits)
            if set(check(design, scopes=_SCOPES)) - refused:
                return None
            report = predict(design)
            if report.fits:
                return (design, report), found.gap
            work = _tighter(work, report)
    except ConfigError:
        return None
    return None


def _with(made: Design, found: Synthesis, *, splits: bool) -> Design:
    program = found.program if splits else found.program.whole()
    return replace(made, plan=replace(made.plan, schedule=planned.of(program, chunks=made.plan.schedule.chunks)))


def _tighter(work: Workload, report: Report) -> Workload:
    """With as much less memory as the ranks are over theirs."""
    over = [max(held.total - held.capacity, 0.0) for held in report.memory]
    return replace(work, limit_bytes=tuple(room - more for room, more in zip(work.limit_bytes, over, strict=True)))


def _words(classic: Report, table: Report, *, kind: str, gap: float, pays: bool) -> str:
    gain = format_percent(classic.step_seconds / table.step_seconds - 1.0)
    bubbles = " to ".join(format_percent(report.share(LineName.BUBBLE)) for report in (classic, table))
    least = f"no order of its passes is shorter by more than {format_percent(1.0 - 1.0 / (1.0 + max(gap, 0.0)))}"
    if pays:
        return f"a table made for these stages instead of {kind}: {gain} faster, bubble {bubbles}; {least}"
    told = f"{gain} faster" if table.step_seconds < classic.step_seconds else "no faster"
    surely, less = (1.0 if each.fit_probability is None else each.fit_probability for each in (classic, table))
    told += ", and fits less surely" if less < surely else ""
    return f"no table made for these stages instead of {kind} pays: the best is {told}, and {least}"
