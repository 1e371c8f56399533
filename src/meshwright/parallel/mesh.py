"""Mesh: the ranks of a plan on its axes, and the process groups along them; passed by value, never global.

What the shard axis divides is divided over the context axis too, and gradients meet over both alike: the two are one
dim of the device mesh, called shard. The context axis alone has process groups of its own (ContextRanks). Where groups
of blocks are sharded over other numbers of ranks, all data parallel ranks are one dim (DataMeshes).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.copied_heads import Copied, copied_heads
from meshwright.parallel.expert_mesh import ExpertMesh, build_expert_mesh
from meshwright.parallel.extents import DATA, DataMeshes, Extent, all_data, data_meshes
from meshwright.parallel.torch_compat import forget_layouts
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.plan import AxisName, Plan, TensorGrid

OwnGroup = Callable[[Sequence[list[int]]], dist.ProcessGroup | None]
CONTEXT_GROUP = "context"  # the description of groups that only keys, values and heads cross


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRanks:
    """This rank's place on the context axis: `traders` neighbours trade tokens for heads in the group `inner`, and
    `runs` of them meet in `outer`; a group is None where it would hold one rank."""

    rank: int
    size: int
    traders: int
    inner: dist.ProcessGroup | None
    outer: dist.ProcessGroup | None

    @property
    def run(self) -> int:
        return self.rank // self.traders

    @property
    def runs(self) -> int:
        return self.size // self.traders

    @property
    def levels(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of more than one rank that join all ranks of the axis one after the other, in their order."""
        return tuple(group for group in (self.inner, self.outer) if group is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axes larger than one in the plan's order; `root` is None where the plan has one device.

    Ranks of the tensor axis that lie on a square or cube are two or three dims of `root`, the last varying fastest;
    `tensor_places` is where this rank stands on the tensor axis, by the names of its dims. Submeshes are made with the
    mesh, so that no collective hides in a later look-up. `copied` are the numbers of key-value heads that tensor ranks
    have copies of. `extents` are the meshes of blocks that so many data parallel ranks divide, where those are others
    than the shard axis has. `everyone` is the group of all ranks of the plan; None when there is one.
    """

    root: DeviceMesh | None
    rank: int
    world_size: int
    sizes: dict[AxisName, int]
    coordinates: dict[AxisName, int]
    submeshes: dict[tuple[AxisName, ...], DeviceMesh] = field(default_factory=dict)
    context: ContextRanks | None = None
    experts: ExpertMesh | None = None
    tensor_places: dict[str, int] = field(default_factory=dict)
    copied: Mapping[int, Copied] = field(default_factory=dict)
    extents: Mapping[int, Extent] = field(default_factory=dict)
    everyone: dist.ProcessGroup | None = None

    def size(self, axis: AxisName) -> int:
        return self.sizes.get(axis, 1)

    def coordinate(self, axis: AxisName) -> int:
        """Where this rank stands on `axis`."""
        return self.coordinates.get(axis, 0)

    def along(self, *axes: AxisName) -> DeviceMesh | None:
        """The submesh of this rank along `axes`; None when they hold one rank. Axes of size one are left out.

        Along shard it runs along context too.
        """
        names = tuple(axis for axis in axes if (axis,) in self.submeshes)
        return self.submeshes[names] if names else None

    def group(self, axis: AxisName) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; None when it is alone there."""
        submesh = self.along(axis)
        return None if submesh is None else submesh.get_group()

    def replicas_of(self, shards: int | None) -> dist.ProcessGroup | None:
        """Ranks with the same shards of what so many data parallel ranks divide, None those of the shard axis; None
        where this one is alone."""
        replicas = self.along(AxisName.REPLICATE) if shards is None else self.extents[shards].replicas
        return None if replicas is None else replicas.get_group()

    @property
    def data_coordinate(self) -> int:
        """Which of the plan's data ranks this is: replicate-major, as the batch is dealt."""
        shard = self.size(AxisName.SHARD)
        return self.coordinate(AxisName.REPLICATE) * shard + self.coordinate(AxisName.SHARD)

    @property
    def data_size(self) -> int:
        return self.size(AxisName.REPLICATE) * self.size(AxisName.SHARD)

    @property
    def divided_size(self) -> int:
        """Ranks over which what is sharded is divided."""
        return self.size(AxisName.SHARD) * self.size(AxisName.CONTEXT)


def build_mesh(plan: Plan, *, device_type: str, kv_heads: Collection[int] = ()) -> Mesh:
    """The mesh of `plan` over the processes of the default group, whose ranks are the plan's, for models whose mixers
    have so many key-value heads: those of which tensor ranks hold copies need groups of their own.

    Which device holds which rank is settled when that group is made (`Plan.rank_on`): torch numbers the ranks of
    every group in ascending order, so a mesh in any other order would not be the plan's. Collective: every process
    calls it with the same plan. Raises EnvironmentUnfit when there are not as many processes as the plan has devices.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes != plan.world_size:
        devices = f"{plan.world_size} device{'s' * (plan.world_size > 1)}"
        what = f"the plan lays the model over {devices} and {processes} process{'es run' if processes > 1 else ' runs'}"
        raise EnvironmentUnfit(Problem(what=what, where="plan.axes", fix="start one process for each device"))
    mesh = _build(
        plan, device_type=device_type, processes=range(processes), own_group=_by_its_members, kv_heads=kv_heads
    )
    assert mesh is not None, "every process has a rank"
    return mesh


def build_mesh_over(
    plan: Plan, *, device_type: str, processes: Sequence[int], kv_heads: Collection[int] = ()
) -> Mesh | None:
    """The mesh of `plan`, whose rank r is process `processes[r]` of the default group; None where this is none of them.

    `processes` are in ascending order. Collective: every process of the default group calls it alike. What its members
    alone make is named by how many groups each of them is in, which differs after this, so that where it was called
    every later mesh is made by it too.
    """
    assert list(processes) == sorted(set(processes)), "torch numbers the ranks of a group in ascending order"
    assert len(processes) == plan.world_size, "one process for each rank of the plan"
    return _build(plan, device_type=device_type, processes=processes, own_group=_by_all, kv_heads=kv_heads)


def _build(
    plan: Plan, *, device_type: str, processes: Sequence[int], own_group: OwnGroup, kv_heads: Collection[int]
) -> Mesh | None:
    here = dist.get_rank() if dist.is_initialized() else 0
    axes = [axis for axis in plan.axes if axis.size > 1]
    if not axes:
        return Mesh(root=None, rank=0, world_size=1, sizes={}, coordinates={}) if here == processes[0] else None
    forget_layouts()
    names = [axis.name for axis in axes]
    grid = torch.tensor(processes).view([axis.size for axis in axes])
    dims, dim_names = _joined(grid, names)
    if plan.extents:
        dims, dim_names = all_data(dims, dim_names)
    assert all(bool((dims.diff(dim=dim) > 0).all()) for dim in range(dims.dim())), "ranks of a group ascend"
    held = {name: _dims_of(name, plan) for name in dim_names}
    shape = [size for name in dim_names for size in _sizes_of(name, plan, ranks=dims.shape[dim_names.index(name)])]
    root = DeviceMesh(device_type, dims.reshape(shape), mesh_dim_names=tuple(d for each in held.values() for d in each))
    data = data_meshes(root, plan) if plan.extents else DataMeshes(own={}, extents={})
    on_line = AxisName.TENSOR in held and plan.tensor_grid is TensorGrid.LINE
    copied = copied_heads(root, tensor=plan.tensor, kv_heads=kv_heads) if on_line else {}
    everyone = _everyone(processes)
    experts = build_expert_mesh(plan, device_type=device_type, processes=processes)
    context = _context_ranks(plan, grid, names, own_group=own_group) if AxisName.CONTEXT in names else None
    if here not in processes:
        return None
    place = (grid == here).nonzero()[0].tolist()
    return Mesh(
        root=root,
        rank=list(processes).index(here),
        world_size=plan.world_size,
        sizes={axis.name: axis.size for axis in axes},
        coordinates=dict(zip(names, place, strict=True)),
        submeshes=_submeshes(root, held) | dict(data.own),
        context=context,
        experts=experts,
        tensor_places={name: root.get_local_rank(name) for name in held.get(AxisName.TENSOR, ())},
        copied=copied,
        extents=data.extents,
        everyone=everyone,
    )


def _dims_of(name: AxisName, plan: Plan) -> tuple[str, ...]:
    """Names of the dims of the device mesh that an axis is."""
    if name is AxisName.SHARD and plan.extents:
        return (DATA,)
    if name is not AxisName.TENSOR or plan.tensor_grid is TensorGrid.LINE:
        return (name.value,)
    return tuple(f"{name.value}_{index}" for index in range(plan.tensor_grid.dims))


def _sizes_of(name: AxisName, plan: Plan, *, ranks: int) -> tuple[int, ...]:
    """Their sizes, of an axis of so many ranks."""
    count = len(_dims_of(name, plan))
    return (ranks,) if count == 1 else (plan.tensor_grid.side(ranks),) * count


def _everyone(processes: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of `processes`. Collective over all processes."""
    if len(processes) == dist.get_world_size():
        return dist.group.WORLD
    made: dist.ProcessGroup | None = dist.new_group(list(processes))
    return made


def _joined(grid: torch.Tensor, names: list[AxisName]) -> tuple[torch.Tensor, list[AxisName]]:
    """The grid of ranks with shard and context as one dim, shard: that of the two which varies fastest in the plan
    does in it, so that its ranks ascend as torch numbers them."""
    if AxisName.CONTEXT not in names:
        return grid, names
    rest: list[AxisName] = [name for name in names if name is not AxisName.CONTEXT]
    if AxisName.SHARD not in rest:
        return grid, [AxisName.SHARD if name is AxisName.CONTEXT else name for name in names]
    place = rest.index(AxisName.SHARD)
    both = [name for name in names if name in (AxisName.SHARD, AxisName.CONTEXT)]
    order = [*rest[:place], *both, *rest[place + 1 :]]
    return grid.permute([names.index(name) for name in order]).flatten(place, place + 1), rest


def _context_ranks(
    plan: Plan, grid: torch.Tensor, names: list[AxisName], *, own_group: OwnGroup
) -> ContextRanks | None:
    """None where this process has no rank of the plan."""
    runs = grid.movedim(names.index(AxisName.CONTEXT), -1).reshape(-1, plan.context).tolist()
    traders = plan.exchange.inner
    inner = own_group([run[first : first + traders] for run in runs for first in range(0, plan.context, traders)])
    outer = own_group([run[first::traders] for run in runs for first in range(traders)])
    own = next((run for run in runs if dist.get_rank() in run), None)
    if own is None:
        return None
    rank = own.index(dist.get_rank())
    return ContextRanks(rank=rank, size=plan.context, traders=traders, inner=inner, outer=outer)


def _by_its_members(sets: Sequence[list[int]]) -> dist.ProcessGroup | None:
    """The group of that of `sets` that this process is in, which its members alone make: no rank makes those of a whole
    cluster."""
    own = next(ranks for ranks in sets if dist.get_rank() in ranks)
    if len(own) == 1:
        return None
    return dist.new_group(own, use_local_synchronization=True, group_desc=CONTEXT_GROUP)


def _by_all(sets: Sequence[list[int]]) -> dist.ProcessGroup | None:
    """As `_by_its_members`, made by every process; None where this one is in none of them."""
    made = [dist.new_group(ranks, group_desc=CONTEXT_GROUP) if len(ranks) > 1 else None for ranks in sets]
    found = zip(sets, made, strict=True)
    return next((group for ranks, group in found if dist.get_rank() in ranks), None)


def _submeshes(root: DeviceMesh, held: dict[AxisName, tuple[str, ...]]) -> dict[tuple[AxisName, ...], DeviceMesh]:
    """Every single axis, and replicate with shard as one two-axis mesh."""
    found: dict[tuple[AxisName, ...], DeviceMesh] = {(name,): root[dims] for name, dims in held.items()}
    both = (AxisName.REPLICATE, AxisName.SHARD)
    if all(name in held for name in both):
        found[both] = root[AxisName.REPLICATE.value, AxisName.SHARD.value]
    return found
