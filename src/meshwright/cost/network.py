"""Seconds of collectives and sends: rings laid on real positions, adapters shared by the ranks of a node.

Times are latency plus bytes over bandwidth, bytes being the whole tensor: the input of an all-reduce, a
reduce-scatter or an all-to-all, the output of an all-gather, the message of a send.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.placement import Ring
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Collective, CollectiveFit, Link, NodeGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Seconds of one operation: latency + bytes * per_byte; arrays of shape (rows,)."""

    latency: FloatArray
    per_byte: FloatArray

    def seconds(self, num_bytes: FloatArray | float, *, calls: FloatArray | float = 1.0) -> FloatArray:
        """Seconds of `calls` operations that move `num_bytes` in all."""
        return self.latency * calls + self.per_byte * num_bytes

    def slowed(self, factor: FloatArray) -> Linear:
        return Linear(latency=self.latency * factor, per_byte=self.per_byte * factor)


def collective(operation: Collective, ring: Ring, *, group: NodeGroup, cluster: ClusterSpec) -> Linear:
    """What `operation` among the ranks of `ring` takes; nothing where the ring has one rank.

    Measured fits of a link come before formulas as far as their largest number of ranks.
    """
    formula = _formula(operation, ring, group=group)
    near = _fitted(operation, ring.size, formula, link=group.inside)
    far = _fitted(operation, ring.size, formula, link=group.nic)
    if group.rack is not None:
        racked = _fitted(operation, ring.size, formula, link=group.rack)
        far = _choose(ring.racked, racked, far)
    local = _choose(ring.nodes <= 1.0, near, far)
    total = _add(local, _wide(operation, ring, cluster=cluster))
    alone = ring.size <= 1.0
    return Linear(latency=np.where(alone, 0.0, total.latency), per_byte=np.where(alone, 0.0, total.per_byte))


def send(link: Link, *, senders: FloatArray, adapters: float) -> Linear:
    """One message over `link` while `senders` ranks of a node send over its `adapters` at once."""
    share = np.minimum(1.0, adapters / senders)
    fits = [fit for fit in link.fits if fit.operation is Collective.SEND]
    if fits:
        latency, bandwidth = fits[0].latency_seconds, fits[0].bytes_per_second
    else:
        latency, bandwidth = link.latency_seconds, link.bandwidth * link.efficiency / link.oversubscription
    return Linear(latency=latency + np.zeros_like(senders), per_byte=1.0 / (bandwidth * share))


def _moved(operation: Collective, size: FloatArray) -> FloatArray:
    """Bytes that pass each rank's link, over the bytes of the tensor."""
    if operation is Collective.SEND:
        return np.ones_like(size)
    return (2.0 if operation is Collective.ALL_REDUCE else 1.0) * (size - 1.0) / np.maximum(size, 1.0)


def _formula(operation: Collective, ring: Ring, *, group: NodeGroup) -> Linear:
    """A ring over all ranks, its slowest link deciding; the latency of a tree between nodes where that is less.

    A ring with r ranks in a node uses r of the adapters' shares, the rings beside it use the rest (NIC sharing).
    """
    inside = group.inside.bandwidth * group.inside.efficiency
    share = ring.per_node * group.nics / group.devices_per_node
    between = group.nic.bandwidth * group.nic.efficiency / group.nic.oversubscription * share
    hop = np.full_like(ring.size, group.nic.latency_seconds)
    if group.rack is not None:
        rack = group.rack.bandwidth * group.rack.efficiency
        between = np.where(ring.racked, rack, between)
        hop = np.where(ring.racked, group.rack.latency_seconds, hop)
    within = np.where(ring.per_node > 1.0, inside, np.inf)
    bandwidth = np.minimum(within, np.where(ring.nodes > 1.0, between, np.inf))
    steps = 2.0 if operation is Collective.ALL_REDUCE else 1.0
    near = (ring.per_node - 1.0) * group.inside.latency_seconds
    around = (ring.nodes - 1.0) * hop
    tree = np.ceil(np.log2(np.maximum(ring.nodes, 1.0))) * hop
    far = np.minimum(around, tree) if operation is Collective.ALL_REDUCE else around
    return Linear(latency=steps * (near + far), per_byte=_moved(operation, ring.size) / bandwidth)


def _wide(operation: Collective, ring: Ring, *, cluster: ClusterSpec) -> Linear:
    """The part between sites: every rival ring sends its reduced tensor through the site's one link."""
    link = cluster.wide_area
    if link is None:
        zeros = np.zeros_like(ring.size)
        return Linear(latency=zeros, per_byte=zeros)
    bandwidth = link.bandwidth * link.efficiency / link.oversubscription
    steps = 2.0 if operation is Collective.ALL_REDUCE else 1.0
    crossed = ring.sites > 1.0
    return Linear(
        latency=np.where(crossed, steps * (ring.sites - 1.0) * link.latency_seconds, 0.0),
        per_byte=np.where(crossed, _moved(operation, ring.sites) * ring.rivals / bandwidth, 0.0),
    )


def _fitted(operation: Collective, size: FloatArray, formula: Linear, *, link: Link) -> Linear:
    """Measured times interpolated over the logarithm of ranks; the formula beyond the largest measured group."""
    fits = sorted((fit for fit in link.fits if fit.operation is operation and fit.ranks > 1), key=_ranks)
    if not fits:
        return formula
    known = np.log2([fit.ranks for fit in fits])
    at = np.log2(np.maximum(size, 2.0))
    latency = np.interp(at, known, [fit.latency_seconds for fit in fits])
    per_byte = np.interp(at, known, [1.0 / fit.bytes_per_second for fit in fits])
    return _choose(size <= fits[-1].ranks, Linear(latency=latency, per_byte=per_byte), formula)


def _ranks(fit: CollectiveFit) -> int:
    return fit.ranks


def _choose(condition: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], yes: Linear, no: Linear) -> Linear:
    return Linear(
        latency=np.where(condition, yes.latency, no.latency), per_byte=np.where(condition, yes.per_byte, no.per_byte)
    )


def _add(first: Linear, second: Linear) -> Linear:
    return Linear(latency=first.latency + second.latency, per_byte=first.per_byte + second.per_byte)
