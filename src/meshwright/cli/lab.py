"""`meshwright lab`: a cluster's nodes as hosts of this machine, or real ones, to measure or to run a command on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.lab import Lab, Outcome, Topology
    from meshwright.lab.links import Pair
    from meshwright.spec.cluster import NodeGroup


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Lay a cluster's nodes out as hosts whose links have its rates, and measure them or run a command on all."""
    from meshwright import catalog
    from meshwright.cli.output import note
    from meshwright.lab import Lab, topology
    from meshwright.lab.real import is_real, node_of, real_lab
    from meshwright.run.machine import cache_root
    from meshwright.spec.errors import ConfigError, Problem

    if command and out:
        raise ConfigError(
            Problem(what="--out is of measured links, which a command is not", fix="leave one of them out")
        )
    if is_real(where):
        if loss or cores:
            what = "--loss and --cores are of hosts that are made here"
            raise ConfigError(Problem(what=what, where=where, fix="leave them out: real hosts are as they are"))
        with real_lab(where) as made:
            if command:
                return _run(made, command, as_json=as_json)
            nodes = [node_of(host) for host in made.hosts] if out else []
            return _measure(made, None, nodes, seconds=seconds, out=out, as_json=as_json)
    cluster = catalog.load_cluster(where, cache=cache_root())
    asked = topology(cluster, loss=loss)
    note(f"hosts and links that are made: {len(asked.hosts)} and {len(asked.uplinks)}")
    with Lab.of(asked, cores=cores) as made:
        if command:
            return _run(made, command, as_json=as_json)
        nodes = [group for group in cluster.groups for _ in range(group.num_nodes)]
        return _measure(made, asked, nodes, seconds=seconds, out=out, as_json=as_json)


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


def _measure(
    made: Lab,
    asked: Topology | None,
    nodes: Sequence[NodeGroup],
    *,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> int:
    from meshwright.cli.output import console, note, print_json, write
    from meshwright.lab.links import cluster_of, islands, measure_pairs
    from meshwright.spec.codec import canonical

    pairs = measure_pairs(made, seconds=seconds, done=lambda now, of: note(f"{now} of {of} links measured"))
    found = islands(pairs, hosts=len(made.hosts))
    if out is not None:
        write(out, canonical(cluster_of(pairs, name=out.stem, nodes=nodes)))
        note(f"cluster written to {out}")
    if as_json:
        names = [host.name for host in made.hosts]
        print_json({"hosts": names, "pairs": [_told(pair, asked) for pair in pairs], "islands": found})
        return 0
    console().print(_pairs(made, pairs, asked))
    for number, island in enumerate(found):
        print(f"island {number}: {', '.join(made.hosts[host].name for host in island)}")
    return 0


def _told(pair: Pair, asked: Topology | None) -> dict[str, object]:
    bandwidth, latency = asked.between(pair.first, pair.second) if asked else (None, None)
    return {
        "first": pair.first,
        "second": pair.second,
        "bandwidth": pair.bandwidth,
        "latency_seconds": pair.latency_seconds,
        "asked_bandwidth": bandwidth,
        "asked_latency_seconds": latency,
    }


def _pairs(made: Lab, pairs: Sequence[Pair], asked: Topology | None) -> object:
    from meshwright.report.terminal_parts import table
    from meshwright.spec.units import format_rate, format_seconds

    columns = [("between", "left"), ("rate", "right"), ("one way", "right")]
    shown = table(columns=columns + ([("rate asked", "right"), ("one way asked", "right")] if asked else []))
    for pair in pairs:
        row = [f"{made.hosts[pair.first].name} {made.hosts[pair.second].name}"]
        row += [format_rate(pair.bandwidth), format_seconds(pair.latency_seconds)]
        if asked:
            bandwidth, latency = asked.between(pair.first, pair.second)
            row += [format_rate(bandwidth), format_seconds(latency) if latency else "the machine's own"]
        shown.add_row(*row)
    return shown


def _outcomes(outcomes: Sequence[Outcome]) -> object:
    from meshwright.report.terminal_parts import table
    from meshwright.spec.units import format_bytes, format_seconds

    names = ("exit code", "time", "sent", "received")
    shown = table(columns=[("host", "left"), *((name, "right") for name in names)])
    for each in outcomes:
        sent, received = format_bytes(each.traffic.sent_bytes), format_bytes(each.traffic.received_bytes)
        shown.add_row(each.host, str(each.exit_code), format_seconds(each.seconds), sent, received)
    return shown
