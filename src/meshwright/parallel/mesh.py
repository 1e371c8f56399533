"""Mesh: the ranks of a plan on its axes, and the process groups along them; passed by value, never global."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.expert_mesh import ExpertMesh, build_expert_mesh
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.plan import AxisName, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axes larger than one in the plan's order; `root` is None where the plan has one device.

    Submeshes are made with the mesh, so that no collective hides in a later look-up.
    """

    root: DeviceMesh | None
    rank: int
    world_size: int
    sizes: dict[AxisName, int]
    coordinates: dict[AxisName, int]
    submeshes: dict[tuple[AxisName, ...], DeviceMesh] = field(default_factory=dict)
    experts: ExpertMesh | None = None

    def size(self, axis: AxisName) -> int:
        return self.sizes.get(axis, 1)

    def coordinate(self, axis: AxisName) -> int:
        """Where this rank stands on `axis`."""
        return self.coordinates.get(axis, 0)

    def along(self, *axes: AxisName) -> DeviceMesh | None:
        """The submesh of this rank along `axes`; None when they hold one rank. Axes of size one are left out."""
        names = tuple(axis for axis in axes if self.size(axis) > 1)
        return self.submeshes[names] if names else None

    def group(self, axis: AxisName) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; None when it is alone there."""
        submesh = self.along(axis)
        return None if submesh is None else submesh.get_group()

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the plan; None when there is one."""
        return None if self.root is None else dist.group.WORLD

    @property
    def data_coordinate(self) -> int:
        """Which of the plan's data ranks this is: replicate-major, as the batch is dealt."""
        shard = self.size(AxisName.SHARD)
        return self.coordinate(AxisName.REPLICATE) * shard + self.coordinate(AxisName.SHARD)

    @property
    def data_size(self) -> int:
        return self.size(AxisName.REPLICATE) * self.size(AxisName.SHARD)


def build_mesh(plan: Plan, *, device_type: str) -> Mesh:
    """The mesh of `plan` over the processes of the default group, whose global rank d is the cluster's device d.

    `plan.placement[r]` is the device of logical rank r. Collective: every process calls it with the same plan.
    Raises EnvironmentUnfit when there are not as many processes as the plan has devices.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes != plan.world_size:
        what = f"the plan lays the model over {plan.world_size} devices and {processes} processes run"
        raise EnvironmentUnfit(Problem(what=what, where="plan.axes", fix="start one process for each device"))
    axes = [axis for axis in plan.axes if axis.size > 1]
    if not axes:
        return Mesh(root=None, rank=0, world_size=1, sizes={}, coordinates={})
    devices = torch.tensor(plan.placement or range(plan.world_size))
    grid = devices.view([axis.size for axis in axes])
    root = DeviceMesh(device_type, grid, mesh_dim_names=tuple(axis.name.value for axis in axes))
    coordinate = root.get_coordinate()
    assert coordinate is not None, "every process is in the mesh"
    return Mesh(
        root=root,
        rank=dist.get_rank(),
        world_size=plan.world_size,
        sizes={axis.name: axis.size for axis in axes},
        coordinates={axis.name: place for axis, place in zip(axes, coordinate, strict=True)},
        submeshes=_submeshes(root, [axis.name for axis in axes]),
        experts=build_expert_mesh(plan, devices=devices, device_type=device_type),
    )


def _submeshes(root: DeviceMesh, names: list[AxisName]) -> dict[tuple[AxisName, ...], DeviceMesh]:
    """Every single axis, and replicate with shard as one two-axis mesh."""
    found: dict[tuple[AxisName, ...], DeviceMesh] = {(name,): root[name.value] for name in names}
    both = (AxisName.REPLICATE, AxisName.SHARD)
    if all(name in names for name in both):
        found[both] = root[AxisName.REPLICATE.value, AxisName.SHARD.value]
    return found
