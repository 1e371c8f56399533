"""Predictions of published runs on the terminal: scores of every source, and what could not be predicted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from meshwright.report.terminal_parts import plain, table, title

if TYPE_CHECKING:
    from meshwright.replay import RegimeScores, Scores, Validation

_SECONDS_BETWEEN_LINES = 3.0
_REASONS_SHOWN = 12
_WIDE = 132  # columns that the table of sources takes at its longest names
_NAME = 13


class Progress:
    """Says how many rows, or what `noun` names, are done and what comes now, every few seconds."""

    def __init__(self, say: Callable[[str], None], *, noun: str = "rows") -> None:
        self._say, self._noun = say, noun
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int, now: str = "") -> None:
        if time.monotonic() >= self._next:
            self._say(f"{done:,} of {total:,} {self._noun}{f'; now: {now}' if now else ''}")
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES


def validation(found: Validation) -> Group:
    """A row a source, the mean over sources first; below, why rows were left out."""
    memory = found.overall.oom
    died = memory.died_refused + memory.died_accepted
    ran = memory.ran_refused + memory.ran_accepted
    told = plain(
        f"memory: {memory.died_refused} of {died} runs that died of it are refused, "
        f"{memory.ran_refused} of {ran} that ran are refused too"
    )
    by_regime = (title("by regime"), regimes(found.regimes))
    return Group(SourcesView(found), told, *_untimed(found), *by_regime, *_left_out(found), *_remarked(found))


def _untimed(found: Validation) -> list[Text]:
    """Of runs that ended well those that are predicted and compared with no time, and what they lack."""
    runs = [row.run for row in found.rows if not row.reason and row.run.ran and row.run.seconds is None]
    if not runs:
        return []
    rated = Counter(why for run in runs if (why := run.uncounted))
    each = "; ".join(f"{count:,} with FLOP/s and {why}" for why, count in rated.most_common())
    said = f" ({each})" if each else ""
    fix = "give iter_s, tokens_s_gpu, or tflops_gpu with flop_conv (docs/validate.md)"
    return [plain(f"time: predicted runs without seconds of a step: {len(runs):,}{said}; {fix}")]


class SourcesView:
    """A row a source, the mean over sources first; where they do not fit beside each other, figures stand in threes."""

    def __init__(self, found: Validation) -> None:
        self.found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        named = [("mean of sources", self.found.overall), *self.found.sources.items()]
        narrow = options.max_width < _WIDE
        heads = _stacked(_COLUMNS) if narrow else list(_COLUMNS)
        rows = table(columns=[("source", "left"), *((head, "right") for head in heads)])
        for place, (name, scores) in enumerate(named):
            cells = _stacked(_cells(scores)) if narrow else _cells(scores)
            shown = "\n".join(wrap(name, _NAME, break_long_words=False)) if narrow else name
            rows.add_row(plain(shown or "(no source)", style="" if place else "bold"), *cells)
            if narrow:
                rows.add_section()
        yield rows


def _stacked(cells: Sequence[str]) -> list[str]:
    """Eleven cells as four, of up to three lines."""
    return ["\n".join(cells[start : start + 3]) for start in range(0, len(cells), 3)]


def regimes(found: Mapping[str, RegimeScores]) -> Table:
    """A row for what most of a step beside compute goes to: timed runs, their errors, and those in the interval."""
    names = ("runs", "sources", "error", "bias", "in 90 %")
    rows = table(columns=[("regime", "left"), *((name, "right") for name in names)])
    for name, scores in found.items():
        shares = (scores.mape, scores.bias, scores.interval_coverage)
        rows.add_row(name, f"{scores.runs:,}", str(scores.sources), *(f"{share:.1f} %" for share in shares))
    return rows


def _left_out(found: Validation) -> list[Text | Table]:
    if not found.reasons:
        return []
    first = {row.reason: row.run.line for row in reversed(found.rows) if row.reason}
    rows = table(columns=[("rows", "right"), ("first in line", "right"), ("not predicted, because", "left")])
    for reason, count in list(found.reasons.items())[:_REASONS_SHOWN]:
        rows.add_row(f"{count:,}", f"{first[reason]:,}", reason)
    more = len(found.reasons) - _REASONS_SHOWN
    if more > 0:
        rows.add_row("", "", f"and {more:,} more reasons: --json or --predictions")
    return [title("left out"), rows]


def _remarked(found: Validation) -> list[Text | Table]:
    if not found.remarks:
        return []
    rows = table(columns=[("rows", "right"), ("in the table and not read", "left")])
    for remark, count in list(found.remarks.items())[:_REASONS_SHOWN]:
        rows.add_row(f"{count:,}", remark)
    more = len(found.remarks) - _REASONS_SHOWN
    if more > 0:
        rows.add_row("", f"and {more:,} more: --json")
    return [title("remarks"), rows]


_COLUMNS = (
    "rows",
    "predicted",
    "error",
    "one factor",
    "ten runs",
    "bias",
    "pairs",
    "regret@1",
    "regret@3",
    "memory",
    "in 90 %",
)


def _cells(scores: Scores) -> list[str]:
    values = (
        scores.mape_zero_shot,
        scores.mape_one_factor,
        scores.mape_calibrated,
        scores.bias,
        scores.pairwise_accuracy,
        scores.regret_at_1,
        scores.regret_at_3,
        scores.memory_mape,
        scores.interval_coverage,
    )
    shown = ["" if value is None else f"{value:.1f} %" for value in values]
    return [f"{scores.rows:,}", f"{scores.predicted:,}", *shown]
