"""The cluster as the ranks of a plan see it: nodes in the order in which `plan.placement` takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """Node `index` of the group at `group`, whose devices are `first` and those after it."""

    group: int
    index: int
    first: int


def as_placed(plan: Plan, cluster: ClusterSpec) -> ClusterSpec:
    """`cluster` with its nodes in the order of `plan.placement`: there rank r lies on device r.

    Nodes that are not used come last, those like the last that is used and then those of its site first; those of
    other sites that are used are left out, as no rank of these comes after. Devices of a node are alike. Raises
    ConfigError where the ranks of one node come from several, where racks are taken apart, where a site is left and
    entered again, or where the placement is none: no formula here tells of those.
    """
    placement = plan.placement
    if placement is None or placement == tuple(range(plan.world_size)):
        return cluster
    nodes = [
        _Node(group=at, index=index, first=_first(cluster, at) + index * group.devices_per_node)
        for at, group in enumerate(cluster.groups)
        for index in range(group.num_nodes)
    ]
    order = _order(placement, nodes, cluster)
    order += _unused(order, nodes, cluster.groups)
    groups = []
    for at, run in groupby(order, key=lambda node: node.group):
        members = list(run)
        _check_racks(members, cluster.groups[at])
        groups.append(replace(cluster.groups[at], num_nodes=len(members)))
    sites = [site for site, _ in groupby(group.site for group in groups)]
    if len(set(sites)) < len(sites):
        raise _unknown(
            "its ranks leave a site and come back to it", fix="place the ranks of a site one after the other"
        )
    return replace(cluster, groups=tuple(groups))


def _first(cluster: ClusterSpec, at: int) -> int:
    return sum(group.num_devices for group in cluster.groups[:at])


def _order(placement: tuple[int, ...], nodes: list[_Node], cluster: ClusterSpec) -> list[_Node]:
    """The nodes in the order of their ranks, each met once and whole, but for the last one."""
    holders = {
        device: node
        for node in nodes
        for device in range(node.first, node.first + cluster.groups[node.group].devices_per_node)
    }
    order: dict[_Node, None] = {}
    rank = 0
    while rank < len(placement):
        node = holders.get(placement[rank])
        if node is None:
            raise _unknown(f"there is no device {placement[rank]}", fix=f"choose from 0 to {cluster.num_devices - 1}")
        stop = min(rank + cluster.groups[node.group].devices_per_node, len(placement))
        here = placement[rank:stop]
        if node in order or len(set(here)) < len(here) or any(holders.get(device) != node for device in here):
            raise _unknown(
                f"ranks {rank} to {stop - 1} are not those of one whole node",
                fix="give neighbouring ranks the devices of one node after the other, in any order inside it",
            )
        order[node] = None
        rank = stop
    return list(order)


def _unused(order: list[_Node], nodes: list[_Node], groups: tuple[NodeGroup, ...]) -> list[_Node]:
    """The nodes that follow those of `order`, one site after the other."""
    met, last = set(order), order[-1].group
    sites = list(dict.fromkeys([groups[last].site, *(group.site for group in groups)]))
    left = {groups[node.group].site for node in order} - {groups[last].site}
    found = [node for node in nodes if node not in met and groups[node.group].site not in left]
    return sorted(found, key=lambda node: (node.group != last, sites.index(groups[node.group].site)))


def _check_racks(nodes: list[_Node], group: NodeGroup) -> None:
    """Raises ConfigError where nodes that follow each other as a rack of `group` are not one."""
    size = group.rack_nodes
    if size is None:
        return
    for start in range(0, len(nodes), size):
        racks = {node.index // size for node in nodes[start : start + size]}
        if len(racks) > 1 or (start + size > len(nodes) and len(nodes) < group.num_nodes):
            raise _unknown("racks are taken apart", fix=f"place {size} nodes of a rack one after the other")


def _unknown(why: str, *, fix: str) -> ConfigError:
    return ConfigError(
        Problem(what="the cost of this placement is not known", where="plan.placement", why=why, fix=fix)
    )
