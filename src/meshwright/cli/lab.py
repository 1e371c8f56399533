"""`meshwright lab`: a cluster's nodes as hosts of this machine, or real ones, to measure or to run a command on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.lab import Lab, Outcome
    from meshwright.lab.opened import Opened


def lab(
    where: Annotated[
        str, typer.Argument(help="A cluster, whose nodes become hosts here; or ssh:ONE,TWO or docker:ONE,TWO.")
    ],
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: run on every host; without one, links are measured.")
    ] = None,
    loss: Annotated[
        float, typer.Option("--loss", min=0.0, max=0.5, help="Share of packets that wide-area links lose.")
    ] = 0.0,
    cores: Annotated[
        float | None, typer.Option("--cores", min=0.01, help="Cores that the hosts share. [default: all]")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="How long each link is measured.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the machines with their links as measured, for --cluster.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="The Python of real hosts, by its path there. [default: as here]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Lay a cluster's nodes out as hosts whose links have its rates, and measure them or run a command on all."""
    from meshwright.cli.output import note
    from meshwright.lab.opened import opened
    from meshwright.run.machine import cache_root
    from meshwright.run.signals import interrupted_by_signals
    from meshwright.spec.errors import ConfigError, Problem

    if command and out:
        raise ConfigError(
            Problem(what="--out is of measured links, which a command is not", fix="leave one of them out")
        )
    with (
        interrupted_by_signals(),
        opened(where, cache=cache_root(), say=note, loss=loss, cores=cores, python=python) as made,
    ):
        if command:
            return _run(made.lab, command, as_json=as_json)
        return _measure(made, seconds=seconds, out=out, as_json=as_json)


def _run(made: Lab, command: Sequence[str], *, as_json: bool) -> int:
    from meshwright.cli.output import console, print_json, tell
    from meshwright.spec.errors import ExitCode

    def say(host: str, line: str) -> None:
        if as_json:
            tell(f"{host} | {line}")
        else:
            print(f"{host} | {line}", flush=True)

    outcomes = made.run(command, say=say)
    if as_json:
        print_json({"hosts": outcomes})
    else:
        console().print(_outcomes(outcomes))
    return int(ExitCode.WORKER if any(outcome.exit_code for outcome in outcomes) else ExitCode.OK)


def _measure(made: Opened, *, seconds: float, out: Path | None, as_json: bool) -> int:
    from meshwright.cli import links
    from meshwright.cli.output import note, print_json, write
    from meshwright.spec.codec import canonical
    from meshwright.spec.report import Origin

    found = links.measured(made, seconds=seconds)
    if out is not None:
        write(out, canonical(found.cluster(made.nodes(), name=out.stem, origin=Origin.ANALYTIC)))
        note(f"cluster written to {out}")
    if as_json:
        print_json(found.document())
    else:
        found.show()
    return 0


def _outcomes(outcomes: Sequence[Outcome]) -> object:
    from meshwright.report.terminal_parts import table
    from meshwright.spec.units import format_bytes, format_seconds

    names = ("exit code", "time", "sent", "received")
    shown = table(columns=[("host", "left"), *((name, "right") for name in names)])
    for each in outcomes:
        sent, received = format_bytes(each.traffic.sent_bytes), format_bytes(each.traffic.received_bytes)
        shown.add_row(each.host, str(each.exit_code), format_seconds(each.seconds), sent, received)
    return shown
