"""What a cluster's description says of messages between the hosts of a run: what they cross, and how long they take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.spec.cluster import ClusterSpec, Collective, Link
from meshwright.spec.places import Place, Tier, places, tier_between
from meshwright.train.events import LinksProbed

_FIRST_FLIGHT = 14_480  # bytes that TCP sends before it has heard anything (RFC 6928)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """`tiers[sender][receiver]` is the place in Tier of what a message crosses, `seconds` how long it takes while all
    hosts send to the one equally far behind them; 0 where nothing is said of it."""

    tiers: npt.NDArray[np.int_]
    seconds: npt.NDArray[np.float64]


def undescribed(probed: LinksProbed) -> Described:
    """Nothing is said: all links are alike."""
    shape = (len(probed.hosts), len(probed.hosts))
    return Described(tiers=np.zeros(shape, dtype=np.int_), seconds=np.zeros(shape))


def described(probed: LinksProbed, *, cluster: ClusterSpec, devices: Sequence[int]) -> Described:
    """Of messages of `probed.num_bytes` where rank r of the run lies on device `devices[r]` of `cluster`."""
    every, found = list(places(cluster)), undescribed(probed)
    hosts = [every[devices[probed.host_of.index(host)]] for host in range(len(probed.hosts))]
    order = list(Tier)
    for offset in range(1, len(hosts)):
        pairs = [(index, (index + offset) % len(hosts)) for index in range(len(hosts))]
        crossing = [(hosts[one].site, hosts[other].site) for one, other in pairs]
        leaving = Counter(one for one, other in crossing if one != other)
        coming = Counter(other for one, other in crossing if one != other)
        for (one, other), (home, away) in zip(pairs, crossing, strict=True):
            tier = tier_between(hosts[one], hosts[other])
            flows = max(leaving[home], coming[away]) if home != away else 1
            found.tiers[one, other] = order.index(tier)
            found.seconds[one, other] = _seconds(
                probed.num_bytes, _links(cluster, hosts[one], hosts[other], tier=tier), flows=flows
            )
    return found


def _links(cluster: ClusterSpec, one: Place, other: Place, *, tier: Tier) -> list[Link]:
    """What a message from one to the other crosses, that between sites last; nothing inside a node."""
    ends = [cluster.groups[place.group] for place in (one, other)]
    if tier is Tier.NODE:
        return []
    if tier is Tier.NODES:
        return [group.nic if group.rack is None else group.rack for group in ends]
    wide = [cluster.wide_area] if tier is Tier.SITES and cluster.wide_area is not None else []
    return [*(group.nic for group in ends), *wide]


def _seconds(num_bytes: int, links: Sequence[Link], *, flows: int) -> float:
    """A message over `links`, of which the last is shared by so many `flows`, by a connection that was idle before."""
    if not links:
        return 0.0
    rates = [_rate(link) for link in links]
    rates[-1] /= flows
    latency = max(link.latency_seconds for link in links)
    trips = max(0.0, math.log2(max(num_bytes, 1) / _FIRST_FLIGHT))
    return num_bytes / min(rates) + (1.0 + 2.0 * trips) * latency


def _rate(link: Link) -> float:
    """Bytes/s of one message while others may cross the tier too."""
    for fit in link.fits:
        if fit.operation is Collective.SEND:
            return fit.bytes_per_second
    return link.bandwidth * link.efficiency / link.oversubscription
