"""`meshwright cluster detect` and `measure`: what this machine is, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.manner import speaking

if TYPE_CHECKING:
    from meshwright.spec.cluster import ClusterSpec

Devices = Annotated[int | None, typer.Option("--devices", "-d", min=1, help="How many workers. [default: one a core]")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster here, for --cluster.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def build() -> typer.Typer:
    """The group of the two commands."""
    group = typer.Typer(help="Describe this machine, or measure it.", rich_markup_mode=None)
    group.command("detect")(speaking(detect))
    group.command("measure")(speaking(measure))
    return group


def detect(devices: Devices = None, out: Out = None, as_json: Json = False) -> None:
    """Say what this machine is, with measured figures when it was measured before."""
    from meshwright.run.detect import detect as find

    _show(find(devices=devices), out=out, as_json=as_json)


def measure(
    devices: Devices = None,
    seconds: Annotated[float, typer.Option("--seconds", min=5.0, help="About how long it may take.")] = 90.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: products, memory, attention, start of work and collectives; kept for later plans."""
    from meshwright.cli.output import note
    from meshwright.run.detect import detect as find
    from meshwright.run.measure import measure as run

    cluster = run(None if devices is None else find(devices=devices), seconds_budget=seconds, progress=note)
    _show(cluster, out=out, as_json=as_json)


def _show(cluster: ClusterSpec, *, out: Path | None, as_json: bool) -> None:
    from meshwright.cli.output import console, note, print_json, write
    from meshwright.report import terminal_specs
    from meshwright.spec.codec import canonical

    if out is not None:
        write(out, canonical(cluster))
        note(f"cluster written to {out}")
    if as_json:
        print_json(cluster)
        return
    console().print(terminal_specs.cluster(cluster))
