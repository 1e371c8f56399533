"""`meshwright report`: one self-contained page of a run, or of several side by side, and its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories or designs; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page. [default: report.html in the first run]")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Write the trace of each run beside it.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON document.")] = False,
) -> None:
    """Write one HTML page that needs no network: loss, throughput, timeline, memory, the step and the plans."""
    from meshwright import report as room
    from meshwright.cli.output import print_json, print_plain

    first = runs[0]
    page = room.write_page(runs, out or (first / "report.html" if first.is_dir() else first.with_suffix(".html")))
    traces = [room.write_trace(run, run / "trace.json") for run in runs if trace and run.is_dir()]
    files = [room.read_run(run) for run in runs]
    times, troubles = [each.goodput for each in files], [each.incidents for each in files]
    if as_json:
        paths = [str(path) for path in traces]
        print_json({"page": str(page), "traces": paths, "goodput": times, "incidents": troubles})
        return
    print(f"page   {page} ({page.stat().st_size / 1000:.0f} kB)")
    for run, goodput in zip(runs, times, strict=True):
        for line in room.goodput_lines(goodput) if goodput else ():
            print_plain(line if len(runs) == 1 else f"{run}: {line.strip()}")
    for run, each in zip(runs, troubles, strict=True):
        for incident in each:
            line = room.incident_lines(incident)[0]
            print_plain(line if len(runs) == 1 else f"{run}: {line}")
    for path in traces:
        print(f"trace  {path} (open it in ui.perfetto.dev)")
