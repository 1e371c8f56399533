"""ExpertMesh: the ranks of each stage as its experts see them, a second grid over them (2504.14960)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.spec.plan import AxisName, Plan

REPLICATE, SHARD, EXPERT, TENSOR = "expert_replicate", "expert_shard", "expert", "expert_tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMesh:
    """Where this rank stands on the grid, by the names above, and the groups and meshes along it.

    From the innermost: `expert_tensor` ranks divide each expert, `expert` ranks hold different ones, `expert_shard`
    ranks hold the same ones and divide their state where it is sharded, `expert_replicate` ranks repeat it all.
    Meshes leave out what has one rank and are None where nothing is left; groups likewise.
    """

    sizes: dict[str, int]
    places: dict[str, int]
    holders: DeviceMesh | None
    data: DeviceMesh | None
    experts: dist.ProcessGroup | None
    slices: dist.ProcessGroup | None
    same: tuple[dist.ProcessGroup, ...]

    def size(self, name: str) -> int:
        return self.sizes.get(name, 1)


def grid_sizes(plan: Plan) -> dict[str, int]:
    """Ranks along the grid of one stage, from the outermost: as many shards as the dense parts' leave it."""
    assert plan.experts is not None
    held = plan.experts.expert * plan.experts.tensor
    shards = max(plan.shard * plan.context * plan.tensor // held, 1)
    replicas = plan.world_size // plan.pipeline // (held * shards)
    return {REPLICATE: replicas, SHARD: shards, EXPERT: plan.experts.expert, TENSOR: plan.experts.tensor}


def build_expert_mesh(plan: Plan, *, device_type: str, processes: Sequence[int]) -> ExpertMesh | None:
    """The grid of `plan` over `processes`, which hold its ranks in order; None where it has none, or where this is none
    of them. Collective over the default group.
    """
    if plan.experts is None:
        return None
    inside = grid_sizes(plan)
    names = [axis.name for axis in plan.axes]
    grid = torch.tensor(processes).view([axis.size for axis in plan.axes])
    if AxisName.PIPELINE in names:
        grid = grid.movedim(names.index(AxisName.PIPELINE), 0)
    sizes = {name: size for name, size in {"stage": plan.pipeline, **inside}.items() if size > 1}
    root = _own_groups(DeviceMesh(device_type, grid.reshape(list(sizes.values())), mesh_dim_names=tuple(sizes)))
    coordinate = root.get_coordinate()
    if coordinate is None:
        return None
    holders, data = _part(root, (EXPERT, TENSOR)), _part(root, (REPLICATE, SHARD))
    same = tuple(root[name].get_group() for name in (REPLICATE, SHARD) if name in sizes)
    return ExpertMesh(
        sizes=inside,
        places={name: place for name, place in zip(sizes, coordinate, strict=True) if name in inside},
        holders=holders,
        data=data,
        experts=_named_group(root, EXPERT),
        slices=_named_group(root, TENSOR),
        same=same,
    )


def _part(root: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    present = tuple(name for name in names if name in (root.mesh_dim_names or ()))
    return root[present] if present else None


def _named_group(root: DeviceMesh, name: str) -> dist.ProcessGroup | None:
    return root[name].get_group() if name in (root.mesh_dim_names or ()) else None


def _own_groups(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh with groups described as `mesh_<name>`: by that their traffic is known for what it is.

    A mesh of one axis over all processes has the default group, which others share.
    """
    names = mesh.mesh_dim_names or ()
    is_here = mesh.get_coordinate() is not None
    if len(names) != 1 or not is_here or mesh.get_group() is not dist.group.WORLD:
        return mesh
    group = dist.new_group(list(range(dist.get_world_size())), group_desc=f"mesh_{names[0]}")
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=names)
