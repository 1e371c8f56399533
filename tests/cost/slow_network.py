"""Collectives for the slow simulator, one at a time: the members of a group are listed, and counted node by node.

Written from what NCCL documents of itself: rings and double binary trees, three protocols whose start, step and share
of bandwidth are those of its tuning table (NVIDIA/nccl, src/graph/tuning.cc), peers that are sent to at once in an
all-to-all, and sums in the switch. A link's latency stands for the step of a ring in the plain protocol, so steps are
told relative to the table's 3.4 us in a node and 14 us between nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

from meshwright.spec.cluster import ClusterSpec, Collective, Link, NodeGroup

# start, step in a node, step between nodes (microseconds), share of bandwidth
RING = ((8.4, 3.4, 14.0, 1.0), (14.0, 1.9, 4.0, 0.92), (6.6, 0.6, 2.7, 0.25))
TREE = ((0.0, 4.0, 14.0, 0.92), (14.0, 1.25, 8.5, 0.8464), (6.8, 0.6, 5.0, 0.92 / 3.8))
SWITCH_SECONDS = 25e-6


def rate(link: Link) -> float:
    return link.bandwidth * link.efficiency / link.oversubscription


@dataclass(frozen=True)
class Network:
    """Equal nodes of a cluster with one group and no racks."""

    group: NodeGroup

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Network:
        (group,) = cluster.groups
        assert group.rack is None, "the slow simulator knows nodes alone"
        assert not group.nic.staged
        return cls(group)

    def node(self, device: int) -> int:
        return device // self.group.devices_per_node

    def seconds(self, operation: Collective, members: Sequence[int], num_bytes: float, calls: int = 1) -> float:
        """Of `calls` collectives that move `num_bytes` together (the whole tensor's) among the devices `members`."""
        if len(members) == 1 or num_bytes <= 0.0:
            return 0.0
        counts = Counter(self.node(device) for device in members)
        measured = self._measured(operation, len(members)) if len(counts) == 1 else None
        if measured:
            latency, per_byte = measured
            return calls * latency + num_bytes * per_byte
        ways = self._ways(operation, len(members), counts)
        return min(calls * latency + num_bytes * per_byte for latency, per_byte in ways)

    def _measured(self, operation: Collective, ranks: int) -> tuple[float, float] | None:
        """A measurement of just so many ranks; what a switch adds up for more of them says little of fewer. Where no
        switch adds, a scatter and a gather that were not measured are one half of an all-reduce that was."""
        inside, found = self.group.inside, {}
        for fit in inside.fits:
            if fit.ranks == ranks:
                found[fit.operation] = fit.latency_seconds, 1.0 / fit.bytes_per_second
        halves = operation in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) and inside.sums is None
        if operation not in found and halves and Collective.ALL_REDUCE in found:
            latency, per_byte = found[Collective.ALL_REDUCE]
            return latency / 2.0, per_byte / 2.0
        return found.get(operation)

    def _ways(self, operation: Collective, ranks: int, counts: Counter[int]) -> list[tuple[float, float]]:
        """(latency, seconds a byte) of every algorithm and protocol."""
        near, far = self.group.inside.latency_seconds / 3.4, self.group.nic.latency_seconds / 14.0
        nodes, densest = len(counts), max(counts.values())
        inside = rate(self.group.inside) if densest > 1 else inf
        adapter = rate(self.group.nic) * self.group.nics / self.group.devices_per_node
        outside = adapter * min(counts.values()) if nodes > 1 else inf
        slowest = min(inside, outside)
        if operation is Collective.ALL_TO_ALL:
            return [self._direct(ranks, nodes, densest, inside, adapter)]
        turns = 2 if operation is Collective.ALL_REDUCE else 1
        ways = []
        for start, step, hop, share in RING:
            steps = (ranks - nodes) * step * near + (nodes - 1) * hop * far
            ways.append((start * 1e-6 + turns * steps, turns * (ranks - 1) / ranks / (slowest * share)))
        if operation is Collective.ALL_REDUCE and nodes > 1:
            for start, step, hop, share in TREE:
                steps = (densest - 1) * step * near + ceil(log2(nodes)) * hop * far
                ways.append((start * 1e-6 + 2 * steps, 2.0 / (slowest * share)))
        if operation is Collective.ALL_REDUCE and nodes == 1 and self.group.inside.sums:
            ways.append((SWITCH_SECONDS, (1 + 1 / ranks) / (inside * self.group.inside.sums)))
        return ways

    def _direct(self, ranks: int, nodes: int, densest: int, inside: float, adapter: float) -> tuple[float, float]:
        """Peers are sent to at once; messages to each leave one after the other."""
        near, far = self.group.inside.latency_seconds / 3.4, self.group.nic.latency_seconds / 14.0
        latency = 8.4e-6 + (3.4 * near if densest > 1 else 0.0) + (14.0 * far if nodes > 1 else 0.0)
        latency += max(densest - 2, 0) * 0.6 * near + max(nodes - 2, 0) * 2.7 * far
        local, remote = (densest - 1) / inside, (ranks - densest) / adapter
        return latency, max(local, remote) / ranks

    def send_seconds(self, pairs: Sequence[tuple[int, int]], num_bytes: float) -> float:
        """Of the slowest of messages that all `pairs` of devices send at once."""
        away = Counter(self.node(a) for a, b in pairs if self.node(a) != self.node(b))
        if not away:
            return self.group.inside.latency_seconds + num_bytes / rate(self.group.inside)
        share = min(1.0, self.group.nics / max(away.values()))
        return self.group.nic.latency_seconds + num_bytes / (rate(self.group.nic) * share)
