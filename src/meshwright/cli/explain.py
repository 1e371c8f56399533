"""`meshwright explain`: predicted against measured in words, line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    path: Annotated[Path, typer.Argument(help="A run directory, or a design that plan wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Explain what a run or a plan costs: predicted, measured and the gap of every line, the worst first."""
    from meshwright import report
    from meshwright.cli.output import print_json, print_wrapped

    found = report.explain(path)
    if as_json:
        print_json(found)
        return
    print_wrapped(found.lines())
