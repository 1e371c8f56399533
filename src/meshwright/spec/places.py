"""Places: the site, rack and node of every device of a cluster, and how far apart two of them are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.cluster import ClusterSpec


class Tier(StrEnum):
    """The widest that the ranks of a group lie apart."""

    NODE = "inside nodes"
    NODES = "between nodes"
    RACKS = "between racks"
    SITES = "between sites"


@dataclass(frozen=True, slots=True)
class Place:
    """Racks and nodes are numbered through the cluster; `group` is that of its nodes."""

    site: str
    rack: int
    node: int
    group: int


def places(cluster: ClusterSpec) -> Iterator[Place]:
    """The place of every device in order."""
    rack, node = 0, 0
    for at, group in enumerate(cluster.groups):
        held = group.rack_nodes or group.num_nodes
        for index in range(group.num_nodes):
            own = rack + index // held if group.rack_nodes else 0
            for _ in range(group.devices_per_node):
                yield Place(group.site, own, node + index, at)
        rack += -(-group.num_nodes // held)
        node += group.num_nodes


def tier_between(one: Place, other: Place) -> Tier:
    """What a message from one to the other crosses."""
    if one.site != other.site:
        return Tier.SITES
    if one.rack != other.rack:
        return Tier.RACKS
    return Tier.NODE if one.node == other.node else Tier.NODES
