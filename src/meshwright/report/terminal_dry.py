"""A dry run on the terminal: predicted beside counted, line by line; from 80 columns up."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from meshwright.report import figure
from meshwright.report.dry import dry_view
from meshwright.report.terminal_parts import bullets, plain, table, title
from meshwright.spec.report import Gap, Report


def comparison(counted: Report, gaps: Sequence[Gap], *, plan: str) -> Group:
    """Work, collectives and memory of a dry run, and what differs in words."""
    view = dry_view(counted, gaps, plan=plan)
    parts: list[RenderableType] = [plain(view.plan), title(view.title), _table(view.work)]
    parts += [_table(view.collectives), _table(view.memory), title("what differs"), *bullets(view.sentences)]
    return Group(*parts, title("notes"), *bullets(view.notes))


def _table(rows: figure.Table) -> Table:
    shown = table(columns=[(name, "left" if place == 0 else "right") for place, name in enumerate(rows.headers)])
    for row in rows.rows:
        shown.add_row(*row, style="bold" if row[0].endswith(" peak") else "")
    return shown
