"""`meshwright logs`: what the ranks and nodes of a run's newest launch wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.run.launching.logs import Log


def logs(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    rank: Annotated[int | None, typer.Option("--rank", help="Of this rank alone.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of each file's last lines.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the last lines that jobs, nodes and ranks wrote in the newest launch of a run."""
    from meshwright.cli.output import note, print_json
    from meshwright.run.launching.logs import logs as gather

    found = gather(run, rank=rank, tail=lines)
    if as_json:
        print_json({"run": str(run), "logs": found})
        return
    for log in found:
        for line in log.lines:
            print(f"{_whose(log)} | {line}")
    if not found:
        note(f"nothing was written in {run / 'logs'}: what rank 0 says is where the run was started")


def _whose(log: Log) -> str:
    if log.rank is not None:
        return f"rank {log.rank} {log.stream}"
    return f"node {log.node}" if log.node is not None else Path(log.path).name
