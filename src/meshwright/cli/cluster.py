"""`meshwright cluster detect`, `measure` and `learn`: what machines are, how fast, and what runs on them say of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.manner import speaking

if TYPE_CHECKING:
    from meshwright.run.learn import Learnt
    from meshwright.spec.cluster import ClusterSpec

Devices = Annotated[int | None, typer.Option("--devices", "-d", min=1, help="How many workers. [default: one a core]")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster here, for --cluster.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_LINK_SECONDS = 1.0
_SHOWN = 0.01  # of a figure: what moved by less is not told


def build() -> typer.Typer:
    """The group of the three commands."""
    group = typer.Typer(help="Describe this machine, measure it, or learn from runs.", rich_markup_mode=None)
    group.command("detect")(speaking(detect))
    group.command("measure")(speaking(measure))
    group.command("learn")(speaking(learn))
    return group


def detect(devices: Devices = None, out: Out = None, as_json: Json = False) -> None:
    """Say what this machine is, with measured figures when it was measured before."""
    from meshwright.run.detect import detect as find

    _show(find(devices=devices), out=out, as_json=as_json)


def measure(
    devices: Devices = None,
    seconds: Annotated[float, typer.Option("--seconds", min=5.0, help="About how long it may take.")] = 90.0,
    across: Annotated[
        str | None,
        typer.Option(
            "--across", help="Measure several machines and the links between them: a cluster's file, or ssh:ONE,TWO."
        ),
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="The Python of real hosts, by its path there. [default: as here]")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: products, memory, attention, start of work and collectives; kept for later plans."""
    from meshwright.cli.output import note

    if across is not None:
        _across(across, devices=devices, seconds=seconds, python=python, out=out, as_json=as_json)
        return
    if python is not None:
        raise _unused("--python", fix="--across names hosts that it is of")
    from meshwright.run.detect import detect as find
    from meshwright.run.measure import measure as run

    cluster = run(None if devices is None else find(devices=devices), seconds_budget=seconds, progress=note)
    _show(cluster, out=out, as_json=as_json)


def learn(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs that ended, on one kind of machine.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the cluster here, for --cluster.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", "-c", help="Whose figures are moved. [default: the largest that a run was planned for]"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Move the figures of machines until they explain what runs on them took; the next plan is priced by those."""
    from meshwright import catalog
    from meshwright.cli.output import note, print_json, print_wrapped, write
    from meshwright.run.learn import learn as find
    from meshwright.run.machine import cache_root
    from meshwright.spec.codec import canonical

    found = find(runs, cluster=None if cluster is None else catalog.load_cluster(cluster, cache=cache_root()))
    write(out, canonical(found.cluster))
    note(f"cluster written to {out}")
    if as_json:
        print_json(found)
        return
    print_wrapped(_learnt(found))


def _learnt(found: Learnt) -> Iterator[str]:
    from meshwright.spec.units import format_percent, format_seconds

    for lesson in found.lessons:
        before, after = (
            f"{format_seconds(value)} ({format_percent(value / lesson.measured - 1.0)})"
            for value in (lesson.before, lesson.after)
        )
        yield f"{lesson.run}: {format_seconds(lesson.measured)} a step; foretold {before} before, {after} now"
    moved = [(name, now / was) for name, was, now in found.moved]
    shown = [f"{name} x {ratio:.3g}" for name, ratio in moved if abs(ratio - 1.0) >= _SHOWN]
    yield f"moved: {', '.join(shown)}" if shown else "nothing moved: no figure explains these steps better together"
    off = format_percent(math.expm1(found.step_error))
    if len(found.lessons) == 1:
        yield f"one run alone tells nothing of others: plans for these machines have intervals of {off}, as before"
    else:
        yield f"a run that the others foretell is missed by {off}, and plans for these machines have intervals as wide"


def _across(
    where: str, *, devices: int | None, seconds: float, python: str | None, out: Path | None, as_json: bool
) -> None:
    from meshwright.cli import links
    from meshwright.cli.output import note, print_json, write
    from meshwright.lab.nodes import measured, require_processors
    from meshwright.lab.opened import opened
    from meshwright.run.machine import cache_root
    from meshwright.run.signals import interrupted_by_signals
    from meshwright.spec.codec import canonical
    from meshwright.spec.report import Origin

    if devices is not None:
        raise _unused("--devices", fix="leave it out: each host of --across says how many it has")
    with interrupted_by_signals(), opened(where, cache=cache_root(), say=note, python=python) as made:
        said, here = made.nodes(), made.asked is not None
        if here:
            require_processors(said)
        found = links.measured(made, seconds=_LINK_SECONDS)
        nodes = measured(made.lab, said, made=here, seconds=seconds, say=note)
    cluster = found.cluster(nodes, name=out.stem if out else "across", origin=Origin.CALIBRATED)
    if out is not None:
        write(out, canonical(cluster))
        note(f"cluster written to {out}")
    if as_json:
        print_json({**found.document(), "cluster": cluster})
        return
    found.show()
    _show(cluster, out=None, as_json=False)


def _unused(option: str, *, fix: str) -> Exception:
    from meshwright.spec.errors import ConfigError, Problem

    return ConfigError(Problem(what="would do nothing here", where=option, fix=fix))


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
