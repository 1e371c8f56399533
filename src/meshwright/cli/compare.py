"""`meshwright compare`: two plans or runs side by side, and which is better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    one: Annotated[Path, typer.Argument(help="A design that plan wrote, or a run directory.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare two designs or runs: settings that differ, the step cause by cause, memory by part, and a verdict."""
    from meshwright import report
    from meshwright.cli.output import console, print_json

    found = report.compare(one, other)
    if as_json:
        print_json(found)
        return
    from meshwright.report import terminal_why

    console().print(terminal_why.comparison(found))
