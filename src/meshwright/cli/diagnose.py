"""`meshwright diagnose`: which rank, link or disk was at fault in a run, dead or alive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    run: Annotated[Path, typer.Argument(help="The directory of a run, that ended, failed or goes on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say which rank, link or disk was at fault in a run, since when, how that is known and what to do."""
    from meshwright import report as room
    from meshwright.cli.output import print_json, print_wrapped

    found = room.diagnose(run)
    if as_json:
        print_json({"healthy": found.healthy, **{name: getattr(found, name) for name in found.__slots__}})
    else:
        print_wrapped(found.lines())
