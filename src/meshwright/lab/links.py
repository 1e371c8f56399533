"""Links between hosts as measured pair by pair, the islands that they show, and the cluster that they make."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from meshwright.lab.lab import PORT, Lab
from meshwright.spec.cluster import ClusterSpec, Link, NodeGroup
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.json_text import parse_json
from meshwright.spec.report import Origin
from meshwright.spec.units import format_rate, format_seconds

_TOLD_APART = 2.0  # rates of one tier differ by no more than this many times


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
    """Every pair of hosts, one after another, each for about twice `seconds`: links, whatever cores hosts have.

    Raises EnvironmentUnfit where one cannot reach another.
    """
    pairs = list(combinations(range(len(lab.hosts)), 2))
    lab, found = lab.without_shares(), []
    for number, (first, second) in enumerate(pairs):
        found.append(_measured(lab, first, second, seconds=seconds))
        done(number + 1, len(pairs))
    return tuple(found)


def _measured(lab: Lab, first: int, second: int, *, seconds: float) -> Pair:
    one, other = lab.hosts[first], lab.hosts[second]
    probe = f"{shlex.quote(lab.python)} -m meshwright.lab.probe"
    # The first of the two serves, the second asks.
    serve, ask = f"{probe} serve {{first}} {PORT}", f"{probe} ask {{first}} {PORT} {seconds}"
    script = f"if [ {{host}} = 0 ]; then exec {serve}; fi; exec {ask}"
    served, asked = lab.run(["sh", "-c", script], hosts=[first, second], timeout_seconds=60.0 + 4 * seconds)
    if served.exit_code or asked.exit_code:
        why = (asked.output or served.output).strip().rpartition("\n")[2]
        raise EnvironmentUnfit(Problem(what=f"{other.name} does not reach {one.name}", where=one.address, why=why))
    told = parse_json(asked.output.strip().rpartition("\n")[2])
    return Pair(
        first=first,
        second=second,
        bandwidth=min(told["sent_per_second"], told["received_per_second"]),
        latency_seconds=told["latency_seconds"],
    )


def islands(pairs: Sequence[Pair], *, hosts: int) -> tuple[tuple[int, ...], ...]:
    """Hosts that reach each other at the better rates, in order; one island where no rate is much below another.

    Rates part at the widest step from one to the next below it, if that is to less than half; hosts are of one island
    where pairs above it lead from one to the other (single linkage).
    """
    ranked = sorted(pairs, key=lambda pair: -pair.bandwidth)
    steps = [above.bandwidth / below.bandwidth for above, below in pairwise(ranked)]
    widest = max(range(len(steps)), key=steps.__getitem__, default=0)
    near = ranked[: widest + 1] if steps and steps[widest] > _TOLD_APART else ranked
    joined = [{host} for host in range(hosts)]
    for pair in near:
        one = next(island for island in joined if pair.first in island)
        other = next(island for island in joined if pair.second in island)
        if one is not other:
            joined.remove(other)
            one |= other
    return tuple(tuple(sorted(island)) for island in sorted(joined, key=min))


def cluster_of(
    pairs: Sequence[Pair], *, name: str, hosts: Sequence[str], nodes: Sequence[NodeGroup], origin: Origin
) -> ClusterSpec:
    """The machines as a cluster, island by island: a site for each, and in it a group for each run of like hosts.

    `nodes[h]` is host h, called `hosts[h]`, with what is inside it, whose figures are of `origin`. The adapter of an
    island's nodes is the slowest link in it, the wide-area link the slowest between two; both as one flow alone has
    them, and each names the pairs that it stands for with what they have. An island that reaches some other at more
    than twice that has an uplink of its own.
    """
    found = islands(pairs, hosts=len(nodes))
    place = {host: number for number, island in enumerate(found) for host in island}
    across = [pair for pair in pairs if place[pair.first] != place[pair.second]]
    groups: list[NodeGroup] = []
    for number, island in enumerate(found):
        near = [pair for pair in pairs if place[pair.first] == number == place[pair.second]]
        for host in island:
            alone = replace(nodes[host], num_nodes=1, site=f"island{number}", rack=None, rack_nodes=None)
            if pairs:
                alone = replace(alone, nic=_link(near or across, hosts), nics=1)
            if groups and replace(groups[-1], name=alone.name, num_nodes=1) == alone:
                groups[-1] = replace(groups[-1], num_nodes=groups[-1].num_nodes + 1)
            else:
                groups.append(replace(alone, name=f"island{number}-{len(groups)}"))
    wide = _link(across, hosts) if len(found) > 1 else None
    uplinks = _uplinks(across, place, hosts)
    source = "links measured pair by pair" + (", devices by each host" if origin is Origin.CALIBRATED else "")
    return ClusterSpec(name=name, groups=tuple(groups), wide_area=wide, uplinks=uplinks, origin=origin, source=source)


def _uplinks(across: Sequence[Pair], place: Mapping[int, int], hosts: Sequence[str]) -> dict[str, Link]:
    """By site the link of each island of which some other is reached at a rate well above the slowest between two: the
    best that it has with any, since two meet at the slower one's."""
    between: dict[tuple[int, int], list[Pair]] = {}
    for pair in across:
        for one, other in ((pair.first, pair.second), (pair.second, pair.first)):
            between.setdefault((place[one], place[other]), []).append(pair)
    links = {ends: _link(pairs, hosts) for ends, pairs in between.items()}
    slowest = min((link.bandwidth for link in links.values()), default=0.0)
    best = {
        island: max((link for (one, _), link in links.items() if one == island), key=lambda link: link.bandwidth)
        for island in sorted({one for one, _ in links})
    }
    return {f"island{one}": link for one, link in best.items() if link.bandwidth > _TOLD_APART * slowest}


def _link(pairs: Sequence[Pair], hosts: Sequence[str]) -> Link:
    """What every one of the pairs has; measured rates are reached, so their efficiency is 1."""
    each = {
        f"{pair.first}:{hosts[pair.first]} {pair.second}:{hosts[pair.second]}": (
            f"{format_rate(pair.bandwidth)}, {format_seconds(pair.latency_seconds)} one way"
        )
        for pair in pairs
    }
    return Link(
        bandwidth=min(pair.bandwidth for pair in pairs),
        latency_seconds=max(pair.latency_seconds for pair in pairs),
        efficiency=1.0,
        sources={"bandwidth": "measured between hosts", "latency_seconds": "measured between hosts"} | each,
    )
