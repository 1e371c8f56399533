"""Links between the hosts of a lab, measured and shown beside what was asked: for `lab` and `cluster measure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.lab.links import Pair
    from meshwright.lab.opened import Opened
    from meshwright.lab.topology import Topology
    from meshwright.spec.cluster import ClusterSpec, NodeGroup
    from meshwright.spec.report import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Every pair of hosts by name, the islands that they show, and what was asked where hosts were made."""

    hosts: tuple[str, ...]
    pairs: tuple[Pair, ...]
    islands: tuple[tuple[int, ...], ...]
    asked: Topology | None

    def cluster(self, nodes: Sequence[NodeGroup], *, name: str, origin: Origin) -> ClusterSpec:
        """The hosts as a cluster; `nodes` say what is inside each, and are of `origin`."""
        from meshwright.lab.links import cluster_of

        return cluster_of(self.pairs, name=name, hosts=self.hosts, nodes=nodes, origin=origin)

    def document(self) -> Mapping[str, object]:
        """What --json prints of them."""
        pairs = [_told(pair, self.asked) for pair in self.pairs]
        return {"hosts": self.hosts, "pairs": pairs, "islands": self.islands}

    def show(self) -> None:
        """The table of pairs and the islands are on standard output."""
        from meshwright.cli.output import console

        console().print(_table(self))
        for number, island in enumerate(self.islands):
            print(f"island {number}: {', '.join(self.hosts[host] for host in island)}")


def measured(made: Opened, *, seconds: float) -> Links:
    """All pairs, one after another, each link for `seconds` each way."""
    from meshwright.cli.output import note
    from meshwright.lab.links import islands, measure_pairs

    pairs = measure_pairs(made.lab, seconds=seconds, done=lambda now, of: note(f"{now} of {of} links measured"))
    hosts = tuple(host.name for host in made.lab.hosts)
    return Links(hosts=hosts, pairs=pairs, islands=islands(pairs, hosts=len(hosts)), asked=made.asked)


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


def _table(links: Links) -> object:
    from meshwright.report.terminal_parts import table
    from meshwright.spec.units import format_rate, format_seconds

    columns, asked = [("between", "left"), ("rate", "right"), ("one way", "right")], links.asked
    shown = table(columns=columns + ([("rate asked", "right"), ("one way asked", "right")] if asked else []))
    for pair in links.pairs:
        row = [f"{links.hosts[pair.first]} {links.hosts[pair.second]}"]
        row += [format_rate(pair.bandwidth), format_seconds(pair.latency_seconds)]
        if asked:
            bandwidth, latency = asked.between(pair.first, pair.second)
            row += [format_rate(bandwidth), format_seconds(latency) if latency else "the machine's own"]
        shown.add_row(*row)
    return shown
