"""Predictions of published runs on the terminal: scores of every source, and what could not be predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.report.terminal_parts import table, title

if TYPE_CHECKING:
    from meshwright.replay import RegimeScores, Scores, Validation

_SECONDS_BETWEEN_LINES = 3.0
_REASONS_SHOWN = 12


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
    rows = table(columns=[("source", "left"), *((name, "right") for name in _COLUMNS)])
    rows.add_row(Text("mean of sources", style="bold"), *_cells(found.overall))
    for name, scores in found.sources.items():
        rows.add_row(Text(name or "(no source)"), *_cells(scores))
    memory = found.overall.oom
    died = memory.died_refused + memory.died_accepted
    ran = memory.ran_refused + memory.ran_accepted
    told = Text(
        f"memory: {memory.died_refused} of {died} runs that died of it are refused, "
        f"{memory.ran_refused} of {ran} that ran are refused too"
    )
    return Group(rows, told, title("by regime"), regimes(found.regimes), *_left_out(found))


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
    rows = table(columns=[("rows", "right"), ("not predicted, because", "left")])
    for reason, count in list(found.reasons.items())[:_REASONS_SHOWN]:
        rows.add_row(f"{count:,}", Text(reason))
    more = len(found.reasons) - _REASONS_SHOWN
    if more > 0:
        rows.add_row("", Text(f"and {more:,} more reasons: --json or --predictions"))
    return [title("left out"), rows]


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
