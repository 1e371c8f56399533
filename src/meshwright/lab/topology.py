"""A cluster as the tree of links that a lab builds: hosts hang on switches, and switches on those above them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.cluster import ClusterSpec, Link
from meshwright.spec.errors import ConfigError, Problem

CORE = "core"
_MOST_HOSTS = 64
_HIDDEN_SECONDS = 2e-4  # what a virtual link takes by itself; a shorter delay cannot be told from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """One cable: `below` (a host or a switch) hangs on the switch `above`, with `bandwidth` bytes/s each way, shared
    by all that crosses it; `latency_seconds` one way, `loss` the share of packets that it loses.
    """

    below: str
    above: str
    bandwidth: float
    latency_seconds: float = 0.0
    loss: float = 0.0

    @property
    def is_delayed(self) -> bool:
        """Its delay or loss is more than a virtual link has by itself."""
        return self.latency_seconds > 0.0 or self.loss > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts in the order of the cluster's nodes, the share of this machine's cores that each has, and every cable."""

    hosts: tuple[str, ...]
    shares: tuple[float, ...]
    uplinks: tuple[Uplink, ...]

    @property
    def switches(self) -> tuple[str, ...]:
        """All that something hangs on."""
        return tuple(dict.fromkeys((CORE, *(uplink.above for uplink in self.uplinks))))

    @property
    def even(self) -> bool:
        """All hosts are as fast as each other."""
        return max(self.shares) - min(self.shares) < 1e-9

    def path(self, first: int, second: int) -> tuple[Uplink, ...]:
        """The cables between two hosts, from the first one's to the second one's."""
        there, back = self._climb(self.hosts[first]), self._climb(self.hosts[second])
        shared = {uplink.above for uplink in there} & {uplink.above for uplink in back}
        meet = next(uplink.above for uplink in there if uplink.above in shared)
        return (*_until(there, meet), *reversed(_until(back, meet)))

    def between(self, first: int, second: int) -> tuple[float, float]:
        """(bytes/s, seconds one way) that one flow alone has between two hosts."""
        path = self.path(first, second)
        return min(uplink.bandwidth for uplink in path), sum(uplink.latency_seconds for uplink in path)

    def _climb(self, name: str) -> tuple[Uplink, ...]:
        above = {uplink.below: uplink for uplink in self.uplinks}
        found: list[Uplink] = []
        while name in above:
            found.append(above[name])
            name = above[name].above
        return tuple(found)


def topology(cluster: ClusterSpec, *, loss: float = 0.0) -> Topology:
    """Every node of `cluster` as a host, and a cable for each tier that its bytes cross: the node's, its rack's where
    racks are told, its group's where adapters are oversubscribed, its site's where there are several.

    A host's share of the machine follows the peak of its devices, all shares together 1. Links inside a node are this
    machine's own. `loss` is that of the wide-area cables. Raises ConfigError for a cluster that no machine can hold,
    and for a loss where no cable is of the wide area.
    """
    nodes = sum(group.num_nodes for group in cluster.groups)
    if nodes > _MOST_HOSTS:
        fix = f"name a cluster of at most {_MOST_HOSTS} nodes"
        raise ConfigError(Problem(what=f"a lab of {nodes} hosts", where=cluster.name, fix=fix))
    if loss and (not cluster.has_uplinks or len(cluster.sites) == 1):
        fix = "give its groups a site each and a wide_area link, or ask for no loss"
        raise ConfigError(
            Problem(what="packets are lost on wide-area links, of which it has none", where=cluster.name, fix=fix)
        )
    tree, speeds = _Tree(), list[float]()
    for number, group in enumerate(cluster.groups):
        place = CORE
        if len(cluster.sites) > 1 and (uplink := cluster.uplink(group.site)) is not None:
            place = tree.hang(f"site-{group.site}", CORE, uplink, loss=loss)
        if group.nic.oversubscription > 1.0:
            shared = group.num_nodes * group.nics / group.nic.oversubscription
            place = tree.hang(f"group{number}", place, group.nic, times=shared, instant=True)
        for index in range(group.num_nodes):
            above, link, times = place, group.nic, float(group.nics)
            if group.rack is not None and group.rack_nodes:
                name = f"group{number}-rack{index // group.rack_nodes}"
                above = tree.hang(name, place, group.nic, times=float(group.nics * group.rack_nodes))
                link, times = group.rack, float(group.devices_per_node)
            tree.hang(f"host{len(speeds)}", above, link, times=times)
            speeds.append(group.devices_per_node * max(group.device.peak_flops.values(), default=1.0))
    return Topology(
        hosts=tuple(f"host{index}" for index in range(nodes)),
        shares=tuple(speed / sum(speeds) for speed in speeds),
        uplinks=tuple(tree.uplinks.values()),
    )


class _Tree:
    """Cables, each by what hangs on it."""

    def __init__(self) -> None:
        self.uplinks: dict[str, Uplink] = {}

    def hang(
        self, below: str, above: str, link: Link, *, times: float = 1.0, loss: float = 0.0, instant: bool = False
    ) -> str:
        """`below`, which hangs on `above` by `times` of the link; half its latency, since the way back has the rest."""
        seconds = 0.0 if instant or link.latency_seconds < _HIDDEN_SECONDS else 0.5 * link.latency_seconds
        found = Uplink(below=below, above=above, bandwidth=times * link.bandwidth, latency_seconds=seconds, loss=loss)
        self.uplinks.setdefault(below, found)
        return below


def _until(climb: tuple[Uplink, ...], meet: str) -> tuple[Uplink, ...]:
    end = next(place for place, uplink in enumerate(climb) if uplink.above == meet)
    return climb[: end + 1]
