"""`meshwright doctor`: what this machine has of what training needs, tried for real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.run.doctor import Row


def doctor(
    folder: Annotated[Path | None, typer.Option("--folder", help="Where runs would be kept; here by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Try what training needs of this machine, with a command for each thing; exit 4 when something fails."""
    from meshwright.cli.output import console, print_json
    from meshwright.run.doctor import doctor as examine
    from meshwright.run.doctor import healthy
    from meshwright.spec.errors import ExitCode

    rows = examine(folder=folder)
    if as_json:
        print_json({"healthy": healthy(rows), "rows": rows})
    else:
        console().print(_table(rows))
    return int(ExitCode.OK if healthy(rows) else ExitCode.ENVIRONMENT)


def _table(rows: tuple[Row, ...]) -> Table:
    from meshwright.report.terminal_parts import plain, table

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    shown = table(columns=[("what", "left"), ("state", "left"), ("found", "left"), ("command", "left")])
    for row in rows:
        state = plain(row.state.value, style=colours[row.state.value])
        shown.add_row(row.name, state, row.found, plain(row.command, style="dim"))
    return shown
