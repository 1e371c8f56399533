"""Shares: which devices of a plan each node holds, in the order of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.cluster import DeviceKind, NodeGroup
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design

# The names by which Kubernetes' device plugins offer accelerators.
_RESOURCES = {DeviceKind.CUDA: "nvidia.com/gpu", DeviceKind.ROCM: "amd.com/gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Node `node` of a plan, of the cluster's `group`, holds `count` devices of it from number `first` on."""

    node: int
    group: int
    first: int
    count: int
    machine: NodeGroup

    @property
    def accelerator(self) -> str:
        """What Kubernetes calls its devices; "" where those are processors."""
        return _RESOURCES.get(self.machine.device.kind, "")

    @property
    def cores(self) -> int:
        """Cores that workers which compute on processors share; at least one each."""
        return max(self.machine.cores or 0, self.count)

    @property
    def memory_bytes(self) -> int:
        """Memory of its devices together."""
        return round(self.count * self.machine.device.memory_bytes)


def shares(design: Design) -> tuple[Share, ...]:
    """Every node that the plan uses."""
    world, found = design.plan.world_size, list[Share]()
    for index, machine in enumerate(design.cluster.groups):
        for _ in range(machine.num_nodes):
            first = found[-1].first + found[-1].count if found else 0
            count = min(machine.devices_per_node, world - first)
            if count > 0:
                found.append(Share(node=len(found), group=index, first=first, count=count, machine=machine))
    return tuple(found)


def check_alike(found: tuple[Share, ...], *, place: str) -> Share:
    """The one sort of node that all of `found` are. Raises ConfigError where `place` would have to tell two apart."""
    first = found[0]
    for share in found[1:]:
        if share.machine.device != first.machine.device or share.count != first.count:
            one, other = (f"{each.count} {each.machine.device.name}" for each in (first, share))
            raise ConfigError(
                Problem(
                    what=f"node 0 of the plan has {one} and node {share.node} {other}",
                    where=f"--on {place}",
                    why="its jobs are of equal nodes, and which node comes first is the scheduler's to say",
                    fix="--on ssh names the host of every node; --on kubernetes has a job for each sort of node",
                )
            )
    return first
