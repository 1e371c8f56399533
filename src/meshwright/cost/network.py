"""Seconds of collectives and sends: groups laid on real positions, adapters shared by the ranks of a node.

Times are latency plus bytes over bandwidth, bytes being the whole tensor: the input of an all-reduce, a
reduce-scatter or an all-to-all, the output of an all-gather, the message of a send. What a library would choose for
the bytes at hand is the least over its algorithms and protocols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.lines import Linear, either, quickest
from meshwright.cost.placement import Ring
from meshwright.cost.protocols import SUMS_LATENCY, Protocols, ring_protocols, tree_protocols
from meshwright.cost.torus import Lying, lie
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Collective, CollectiveFit, DeviceKind, Link, NodeGroup

__all__ = ["Linear", "collective", "occupied", "over_sockets", "routes", "send", "send_inside"]
# What messages to many nodes at once reach of an adapter, over what a ring to one neighbour does: 0.7 of the line rate
# is what mixtures of 2504.14960 and Megatron-Bridge trained with, and rings reach 0.875 of it (the efficiency of a
# sheet's adapters), of which that is 0.8. No table of all-to-alls by themselves was found, but for one of kernels that
# send a token once to each node: they reach what rings do (deepseek-ai/DeepEP, docs/legacy.md), alone and evenly; in
# training that is not seen (docs/lab.md).
_SCATTERED = 0.8
_HALVES = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
_NEAR_PROCESSORS, _FAR_PROCESSORS = 0.15, 0.02


def collective(operation: Collective, ring: Ring, *, group: NodeGroup, cluster: ClusterSpec) -> Linear:
    """What `operation` among the ranks of `ring` takes; nothing where the ring has one rank.

    Measured fits of a link come before formulas as far as their largest number of ranks.
    """
    if not (ring.size > 1.0).any():
        return Linear.line(np.zeros_like(ring.size), np.zeros_like(ring.size))
    priced = quickest([lines for _, lines in _routes(operation, ring, group=group)])
    near = _fitted(operation, ring, priced, link=group.inside, group=group)
    far = _fitted(operation, ring, priced, link=group.nic, group=group)
    if group.rack is not None:
        racked = _fitted(operation, ring, priced, link=group.rack, group=group)
        far = either(ring.racks <= 1.0, racked, far)
    local = either(ring.nodes <= 1.0, near, far)
    wide = _wide(operation, ring, kind=group.device.kind, cluster=cluster)
    apart = ring.size > 1.0
    return Linear(
        latency=np.where(apart, local.latency + wide.latency, 0.0),
        per_byte=np.where(apart, local.per_byte + wide.per_byte, 0.0),
    )


def routes(operation: Collective, ring: Ring, *, group: NodeGroup) -> Mapping[str, Linear]:
    """Each way to do `operation` on nodes like those of `group`, one line each, by the name of its algorithm.

    ring: one ring over all ranks, its slowest link deciding. tree (all-reduce): double binary trees between nodes,
    chains inside them (NCCL 2.4). staged, where the network link says so: inside every node, then between those of
    equal place in each over every adapter at once, and back (2D and hierarchical all-reduce, 1811.05233). sums: the
    switch adds, where it can (NVLink SHARP). direct (all-to-all): every rank sends its peers theirs, at most one
    message a node over the network (PXN, NCCL 2.12).
    """
    return {
        name: Linear(latency=lines.latency[index : index + 1], per_byte=lines.per_byte[index : index + 1])
        for names, lines in _routes(operation, ring, group=group)
        for index, name in enumerate(names)
    }


def _routes(operation: Collective, ring: Ring, *, group: NodeGroup) -> list[tuple[tuple[str, ...], Linear]]:
    """`routes` by family: the names of its protocols, and one line for each."""
    at = _Tiers.of(ring, group=group, scattered=operation is Collective.ALL_TO_ALL)
    protocols = ring_protocols(group.device.kind)
    if operation is Collective.ALL_TO_ALL:
        return [(("direct",), _direct(ring, at, protocols))]
    found = [(protocols.names, _flat(operation, ring, at, protocols))]
    several = bool((ring.nodes > 1.0).any())
    if several and group.nic.staged:
        names = tuple(name.replace("ring", "staged") for name in protocols.names)
        found.append((names, _between_nodes(_staged(operation, ring, at, protocols), ring)))
    if operation is Collective.ALL_REDUCE:
        if several:
            trees = tree_protocols(group.device.kind)
            found.append((trees.names, _between_nodes(_tree(ring, at, trees), ring)))
        if group.inside.sums is not None:
            found.append((("sums",), _sums(ring, group=group, share=group.inside.sums)))
    return found


def _between_nodes(lines: Linear, ring: Ring) -> Linear:
    """`lines` of an algorithm for ranks of several nodes, which no group inside one is given."""
    several = ring.nodes > 1.0
    return Linear(latency=np.where(several, lines.latency, np.inf), per_byte=np.where(several, lines.per_byte, 1.0))


def send(link: Link, *, senders: FloatArray, adapters: float) -> Linear:
    """One message over `link` while `senders` ranks of a node send over its `adapters` at once."""
    share = np.minimum(1.0, adapters / senders)
    fits = [fit for fit in link.fits if fit.operation is Collective.SEND]
    if fits:
        latency, bandwidth = fits[0].latency_seconds, fits[0].bytes_per_second
    else:
        latency, bandwidth = link.latency_seconds, link.achieved * float(_met(link, np.full(1, 2.0))[0])
    return Linear.line(latency + np.zeros_like(senders), 1.0 / (bandwidth * share))


def hand_on(link: Link, *, ranks: FloatArray, senders: FloatArray, adapters: float) -> tuple[Linear, bool]:
    """One message of every rank of a ring to the next, and whether it was measured so; else `send` of `link`.

    Between measured numbers of ranks latency and bandwidth are interpolated over their logarithm; beyond, the nearest
    holds.
    """
    fits = sorted((fit for fit in link.fits if fit.operation is Collective.PASS), key=_ranks)
    if not fits:
        return send(link, senders=senders, adapters=adapters), False
    known, at = np.log2([fit.ranks for fit in fits]), np.log2(np.maximum(ranks, 2.0))
    latency, per_byte = (
        np.exp(np.interp(at, known, np.log(values)))
        for values in ([fit.latency_seconds for fit in fits], [1.0 / fit.bytes_per_second for fit in fits])
    )
    return Linear.line(latency, per_byte / np.minimum(1.0, adapters / senders)), True


def send_inside(group: NodeGroup, *, senders: FloatArray) -> Linear:
    """One message between devices of a node, or of a rack, so many in a row sending to as many behind them."""
    if group.rack is not None:
        return send(group.rack, senders=senders, adapters=float(group.devices_per_node))
    found = send(group.inside, senders=senders, adapters=float(group.devices_per_node))
    return over_sockets(found, group.inside, flows=np.minimum(senders, 0.5 * group.devices_per_node))


def over_sockets(found: Linear, link: Link, *, flows: FloatArray) -> Linear:
    """`found`, or as slow as what so many `flows` have between the halves of a node."""
    return replace(found, per_byte=np.maximum(found.per_byte, 1.0 / _across(link, flows)))


def _across(link: Link, flows: FloatArray) -> FloatArray:
    """Bytes/s of one of the `flows` between the halves of a node; infinite where there are none."""
    if link.across_sockets is None:
        return np.full_like(flows, np.inf)
    return np.where(flows > 0.0, link.across_sockets / np.maximum(flows, 1.0), np.inf)


def occupied(ring: Ring, *, kind: DeviceKind) -> FloatArray:
    """The share of a device's compute that carries bytes while a collective of `ring` runs (rows,).

    Kernels of NCCL and RCCL hold processors of the device: 15 % at the rate of links in a node or a rack, 2 % at that
    of adapters (Calculon's A100 systems, 10.1145/3581784.3607102; 20 of 132 in DeepSeek-V3, 2412.19437). Cores copy
    what their own processes send each other in a node, and work for nothing else then. Engines beside the cores carry
    it elsewhere.
    """
    if kind is DeviceKind.CPU:
        return np.where(ring.racks > 1.0, 0.0, 1.0)
    if kind not in (DeviceKind.CUDA, DeviceKind.ROCM):
        return np.zeros_like(ring.size)
    return np.where(ring.racks > 1.0, _FAR_PROCESSORS, _NEAR_PROCESSORS)


def _met(link: Link, ranks: FloatArray) -> FloatArray:
    """The share of a device's links that lead to the others of so many ranks; on a torus to the next of them."""
    if link.torus is not None:
        return np.full_like(ranks, 0.5 / link.torus)
    return np.ones_like(ranks) if link.peers is None else np.clip((ranks - 1.0) / link.peers, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiers:
    """The three tiers under a group: in a node, in a rack, beyond it; links per rank, infinite where not crossed.

    `sockets` is what is left to a group of the link between the halves of a node that it lies in, infinite where it
    lies in one. `adapter` is one rank's share of its node's adapters and `beyond` what all ranks of a group in one rack
    have of them together: groups side by side use the rest. Steps on a torus last no longer than `hops` do.
    """

    inside: FloatArray
    sockets: FloatArray
    rack: FloatArray
    adapter: FloatArray
    beyond: FloatArray
    boxes: FloatArray
    inside_step: float
    rack_step: float
    far_step: float
    hops: FloatArray | float

    @classmethod
    def of(cls, ring: Ring, *, group: NodeGroup, scattered: bool = False) -> _Tiers:
        boxes = ring.nodes / ring.racks if group.rack else np.ones_like(ring.nodes)
        torus = _torus(ring, group=group)
        met = _met(group.inside, ring.per_node) if torus is None else torus.scattered if scattered else torus.rings
        rack = group.rack.achieved * (1.0 if torus is None else met) if group.rack else np.inf
        each = group.nic.achieved * group.nics / group.devices_per_node
        return cls(
            inside=np.where(ring.per_node > 1.0, group.inside.achieved * met, np.inf),
            sockets=_across(group.inside, ring.crossing),
            rack=np.where(boxes > 1.0, rack, np.inf),
            adapter=np.where(ring.racks > 1.0, each, np.inf),
            beyond=np.where(ring.racks > 1.0, each * ring.fewest_rack, np.inf),
            boxes=np.ceil(boxes),
            inside_step=group.inside.latency_seconds,
            rack_step=group.rack.latency_seconds if group.rack else 0.0,
            far_step=group.nic.latency_seconds,
            hops=np.inf if torus is None else torus.hops * group.inside.latency_seconds,
        )

    @property
    def near(self) -> FloatArray:
        return np.minimum(self.inside, self.sockets)

    def steps(self, inside: FloatArray, rack: FloatArray, far: FloatArray, *, protocol: Protocols) -> FloatArray:
        near = np.minimum(inside * self.inside_step + rack * self.rack_step, self.hops)
        return near * protocol.near + far * self.far_step * protocol.far


def _torus(ring: Ring, *, group: NodeGroup) -> Lying | None:
    """How the ranks of a rack, or of a node without one, lie on the torus that joins its devices, if one does."""
    if group.inside.torus is None:
        return None
    devices = group.devices_per_node * min(group.num_nodes, group.rack_nodes or 1)
    return lie(group.inside, ring.per_rack if group.rack else ring.per_node, devices=devices)


def _turns(operation: Collective) -> float:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2.0 if operation is Collective.ALL_REDUCE else 1.0


def _without(count: FloatArray) -> FloatArray:
    """The share of a tensor that a rank of `count` does not hold itself."""
    return (count - 1.0) / np.maximum(count, 1.0)


def _flat(operation: Collective, ring: Ring, at: _Tiers, protocol: Protocols) -> Linear:
    slowest = np.minimum(np.minimum(at.near, at.rack), at.beyond)
    within = at.boxes * ring.racks
    steps = at.steps(ring.size - within, within - ring.racks, ring.racks - 1.0, protocol=protocol)
    turns = _turns(operation)
    return Linear.line(protocol.start + turns * steps, turns * _without(ring.size) / (slowest * protocol.share))


def _staged(operation: Collective, ring: Ring, at: _Tiers, protocol: Protocols) -> Linear:
    """Each tier by itself, one after the other: what a rank holds shrinks by the ranks of the tiers below."""
    stages = (at.boxes > 1.0).astype(np.float64) + (ring.per_node > 1.0) + (ring.racks > 1.0)
    steps = at.steps(ring.per_node - 1.0, at.boxes - 1.0, ring.racks - 1.0, protocol=protocol)
    turns = _turns(operation)
    moved = _without(ring.per_node) / at.near + _without(at.boxes) / (at.rack * ring.fewest)
    moved = moved + (ring.size - ring.fewest_rack) / np.maximum(ring.size, 1.0) / at.beyond
    return Linear.line(protocol.start * stages * turns + turns * steps, turns * moved / protocol.share)


def _tree(ring: Ring, at: _Tiers, protocol: Protocols) -> Linear:
    slowest = np.minimum(np.minimum(at.near, at.rack), at.beyond)
    levels = at.steps(ring.per_node - 1.0, _levels(at.boxes), _levels(ring.racks), protocol=protocol)
    return Linear.line(protocol.start + 2.0 * levels, 2.0 / (slowest * protocol.share))


def _levels(count: FloatArray) -> FloatArray:
    return np.asarray(np.ceil(np.log2(np.maximum(count, 1.0))), dtype=np.float64)


def _sums(ring: Ring, *, group: NodeGroup, share: float) -> Linear:
    """Each rank reads its part summed by the switch and writes it to all: it sends the whole tensor and its part."""
    everywhere = group.rack is not None and group.rack.sums is not None
    reached = ring.racks <= 1.0 if everywhere else ring.nodes <= 1.0
    per_byte = (1.0 + 1.0 / ring.size) / (group.inside.achieved * share)
    return Linear.line(np.where(reached, SUMS_LATENCY, np.inf), per_byte)


def _direct(ring: Ring, at: _Tiers, protocols: Protocols) -> Linear:
    """Each rank sends (n - 1)/n of its bytes: over its node's links, its rack's, and its share of the adapters.

    Half of a node's ranks send half of theirs to the other half of it.
    """
    plain, quick = protocols.only(0), protocols.only(-1)
    near = np.maximum((ring.per_node - 1.0) / at.inside, np.square(0.5 * ring.per_node) / at.sockets)
    near = near + np.maximum(ring.per_rack - ring.per_node, 0.0) / at.rack
    far = (ring.size - np.minimum(ring.fewest_rack, ring.size)) / (_SCATTERED * at.adapter)
    first = at.steps(
        *((count > 1.0).astype(np.float64) for count in (ring.per_node, at.boxes, ring.racks)), protocol=plain
    )
    rest = at.steps(*(np.maximum(count - 2.0, 0.0) for count in (ring.per_node, at.boxes, ring.racks)), protocol=quick)
    return Linear.line(plain.start + first + rest, np.maximum(near, far) / ring.size)


def _wide(operation: Collective, ring: Ring, *, kind: DeviceKind, cluster: ClusterSpec) -> Linear:
    """The part between sites: every rival group sends through a site's one link, the slowest of those that are crossed.

    A ring leaves every site once and comes back once, in each of its steps, and each edge of it carries what a rank
    does not hold; double trees cross with the whole tensor each way and wait for the levels between sites alone. Of an
    all-to-all it is what every rank of the site has for the others.
    """
    crossed = ring.sites > 1.0
    if not crossed.any() or not cluster.has_uplinks:
        return Linear.line(np.zeros_like(ring.size), np.zeros_like(ring.size))
    turns = _turns(operation)
    if operation is Collective.ALL_TO_ALL:
        steps, share = ring.sites - 1.0, _without(ring.sites) * ring.size / ring.sites
    elif operation is Collective.ALL_REDUCE and kind in (DeviceKind.CUDA, DeviceKind.ROCM):
        steps, share = 2.0 * _levels(ring.sites), np.ones_like(ring.size)
    else:
        steps, share = turns * (ring.size - 1.0), turns * _without(ring.size)
    return Linear.line(
        np.where(crossed, steps * ring.site_seconds, 0.0),
        np.where(crossed, share * ring.rivals / ring.site_rate, 0.0),
    )


def _fitted(operation: Collective, ring: Ring, formula: Linear, *, link: Link, group: NodeGroup) -> Linear:
    """Measured times, between measured numbers of ranks by how the formula errs there; the formula beyond them.

    Latency and bandwidth err by factors, interpolated over the logarithm of ranks; below the smallest measured group
    its factors hold. Halves of an all-reduce that were not measured err as it does, unless a switch adds.
    """
    fits = _measured(operation, link)
    if not fits and operation in _HALVES and link.sums is None:
        fits = _measured(Collective.ALL_REDUCE, link)
    if not fits:
        return formula
    factors = [_factors(fit, ring, group=group) for fit in fits]
    known = np.log2([fit.ranks for fit in fits])
    at = np.clip(np.log2(np.maximum(ring.size, 2.0)), known[0], known[-1])
    upper = np.clip(np.searchsorted(known, at), 1, max(len(known) - 1, 1))
    if len(fits) == 1:
        latency, per_byte = factors[0]
    else:
        weight = (at - known[upper - 1]) / (known[upper] - known[upper - 1])
        rows = np.arange(len(at))
        latency, per_byte = (
            np.exp((1.0 - weight) * logs[upper - 1, rows] + weight * logs[upper, rows])
            for logs in (np.log(np.stack([entry[index] for entry in factors])) for index in (0, 1))
        )
    line = Linear.line(formula.latency.min(axis=0) * latency, formula.per_byte.min(axis=0) * per_byte)
    return either(ring.size <= fits[-1].ranks, line, formula)


def _measured(operation: Collective, link: Link) -> list[CollectiveFit]:
    return sorted((fit for fit in link.fits if fit.operation is operation and fit.ranks > 1), key=_ranks)


def _factors(fit: CollectiveFit, ring: Ring, *, group: NodeGroup) -> tuple[FloatArray, FloatArray]:
    """Measured over predicted latency and seconds a byte, for groups of the fit's ranks that lie as `ring` does."""
    ranks = np.full_like(ring.size, float(fit.ranks))
    near, far = (np.minimum(count, ranks) for count in (ring.per_node, ring.per_rack))
    near, far = (np.where(count < 2.0, ranks, held) for count, held in ((ring.nodes, near), (ring.racks, far)))
    at = replace(
        ring,
        size=ranks,
        per_node=near,
        fewest=np.minimum(ring.fewest, near),
        nodes=np.ceil(ranks / near),
        per_rack=far,
        fewest_rack=np.minimum(ring.fewest_rack, far),
        racks=np.ceil(ranks / far),
    )
    formula = quickest([lines for _, lines in _routes(fit.operation, at, group=group)])
    latency, per_byte = formula.latency.min(axis=0), formula.per_byte.min(axis=0)
    return fit.latency_seconds / latency, 1.0 / (fit.bytes_per_second * per_byte)


def _ranks(fit: CollectiveFit) -> int:
    return fit.ranks
