"""Links between hosts as measured pair by pair, the islands that they show, and the cluster that they make."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from meshwright.lab.lab import PORT, Lab
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, Link, NodeGroup
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.report import Origin

_TOLD_APART = 2.0  # a link is another tier's when it is slower than this many times


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts by number and what crosses between them: bytes/s the slower way, seconds one way."""

    first: int
    second: int
    bandwidth: float
    latency_seconds: float


def measure_pairs(
    lab: Lab, *, seconds: float, done: Callable[[int, int], None] = lambda _done, _all: None
) -> tuple[Pair, ...]:
    """Every pair of hosts, one after another, each for about twice `seconds`.

    Raises EnvironmentUnfit where one cannot reach another.
    """
    pairs = list(combinations(range(len(lab.hosts)), 2))
    found = []
    for number, (first, second) in enumerate(pairs):
        found.append(_measured(lab, first, second, seconds=seconds))
        done(number + 1, len(pairs))
    return tuple(found)


def _measured(lab: Lab, first: int, second: int, *, seconds: float) -> Pair:
    one, other = lab.hosts[first], lab.hosts[second]
    probe = f"{sys.executable} -m meshwright.lab.probe"
    # The first of the two serves, the second asks.
    serve, ask = f"{probe} serve {{first}} {PORT}", f"{probe} ask {{first}} {PORT} {seconds}"
    script = f"if [ {{host}} = 0 ]; then exec {serve}; fi; exec {ask}"
    served, asked = lab.run(["sh", "-c", script], hosts=[first, second], timeout_seconds=60.0 + 4 * seconds)
    if served.exit_code or asked.exit_code:
        why = (asked.output or served.output).strip().rpartition("\n")[2]
        raise EnvironmentUnfit(Problem(what=f"{other.name} does not reach {one.name}", where=one.address, why=why))
    told = json.loads(asked.output.strip().rpartition("\n")[2])
    return Pair(
        first=first,
        second=second,
        bandwidth=min(told["sent_per_second"], told["received_per_second"]),
        latency_seconds=told["latency_seconds"],
    )


def islands(pairs: Sequence[Pair], *, hosts: int) -> tuple[tuple[int, ...], ...]:
    """Hosts that reach each other at near the best rate of all, in order; one island where no link is much slower.

    Hosts are joined from the fastest pair down (single linkage) until the next pair is more than twice slower than the
    slowest that joined any.
    """
    joined = [{host} for host in range(hosts)]
    slowest = 0.0
    for pair in sorted(pairs, key=lambda pair: -pair.bandwidth):
        one = next(island for island in joined if pair.first in island)
        other = next(island for island in joined if pair.second in island)
        if slowest and pair.bandwidth * _TOLD_APART < slowest:
            break
        if one is not other:
            joined.remove(other)
            one |= other
        slowest = pair.bandwidth
    return tuple(tuple(sorted(island)) for island in sorted(joined, key=min))


def cluster_of(
    pairs: Sequence[Pair], *, name: str, devices: Sequence[DeviceSpec], devices_per_node: Sequence[int], inside: Link
) -> ClusterSpec:
    """The machines as a cluster: a group for each run of like hosts of an island, a site for each island.

    `devices[h]` and `devices_per_node[h]` are those of host h. The link of an island is the slowest in it, the
    wide-area link the slowest between two.
    """
    found = islands(pairs, hosts=len(devices))
    place = {host: number for number, island in enumerate(found) for host in island}
    across = [pair for pair in pairs if place[pair.first] != place[pair.second]]
    groups: list[NodeGroup] = []
    for number, island in enumerate(found):
        near = [pair for pair in pairs if place[pair.first] == number == place[pair.second]]
        nic = _link(near or across)
        for host in island:
            like = groups and groups[-1].site == f"island{number}" and groups[-1].device == devices[host]
            if like and groups[-1].devices_per_node == devices_per_node[host]:
                groups[-1] = replace(groups[-1], num_nodes=groups[-1].num_nodes + 1)
                continue
            groups.append(
                NodeGroup(
                    name=f"island{number}-{len(groups)}",
                    device=devices[host],
                    num_nodes=1,
                    devices_per_node=devices_per_node[host],
                    inside=inside,
                    nic=nic,
                    site=f"island{number}",
                )
            )
    wide = _link(across) if len(found) > 1 else None
    source = "links measured pair by pair"
    return ClusterSpec(name=name, groups=tuple(groups), wide_area=wide, origin=Origin.CALIBRATED, source=source)


def _link(pairs: Sequence[Pair]) -> Link:
    """What every one of the pairs has; measured rates are reached, so their efficiency is 1."""
    return Link(
        bandwidth=min(pair.bandwidth for pair in pairs),
        latency_seconds=max(pair.latency_seconds for pair in pairs),
        efficiency=1.0,
        sources={"bandwidth": "measured between hosts", "latency_seconds": "measured between hosts"},
    )
