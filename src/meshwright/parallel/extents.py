"""Extents: groups of blocks that other numbers of data parallel ranks divide than the shard axis has.

The data parallel ranks, context ranks fastest, are one dim of the device mesh, which is cut anew for every number: into
the ranks that divide a block, neighbours, and those that repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.torch_compat import unflattened
from meshwright.spec.plan import AxisName, Plan

DATA = "data"
_BOTH = (AxisName.REPLICATE, AxisName.SHARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The ranks that `shards` of a block lie on, one each, those that `replicas` of this rank's do, None where that is
    this rank alone, and `both` as one mesh."""

    shards: DeviceMesh
    replicas: DeviceMesh | None
    both: DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMeshes:
    """Of this rank: those along the plan's own axes, and by their number those of blocks that so many ranks divide."""

    own: Mapping[tuple[AxisName, ...], DeviceMesh]
    extents: Mapping[int, Extent]


def all_data(dims: torch.Tensor, names: list[AxisName]) -> tuple[torch.Tensor, list[AxisName]]:
    """The grid of ranks with replicate and shard, which lies inside it, as one dim; it has the name of shard."""
    if AxisName.REPLICATE not in names:
        return dims, names
    place = names.index(AxisName.REPLICATE)
    return dims.flatten(place, place + 1), [name for name in names if name is not AxisName.REPLICATE]


def data_meshes(root: DeviceMesh, plan: Plan) -> DataMeshes:
    """Of a `root` whose data parallel ranks are one dim. Collective over all processes; those that are not on `root`
    get nothing."""
    shares = {number: (plan.data // number, number * plan.context) for number in (plan.shard, *plan.extents)}
    cut = {number: unflattened(root, DATA, sizes, dim_names(number, plan)) for number, sizes in shares.items()}
    if root.get_coordinate() is None:
        return DataMeshes(own={}, extents={})
    sizes = dict(zip(_BOTH, shares[plan.shard], strict=True))
    wanted: list[tuple[AxisName, ...]] = [(AxisName.REPLICATE,), (AxisName.SHARD,), _BOTH]
    there = [axes for axes in wanted if all(sizes[axis] > 1 for axis in axes)]
    own = {axes: cut[plan.shard][tuple(axis.value for axis in axes)] for axes in there}
    extents = {}
    for number in plan.extents:
        replicas, shards = dim_names(number, plan)
        alone, repeated = cut[number][(shards,)], shares[number][0] > 1
        extents[number] = Extent(
            shards=alone,
            replicas=cut[number][(replicas,)] if repeated else None,
            both=cut[number][(replicas, shards)] if repeated else alone,
        )
    return DataMeshes(own=own, extents=extents)


def dim_names(number: int, plan: Plan) -> tuple[str, str]:
    """Names of the dims of ranks that repeat and that divide what `number` ranks divide."""
    after = "" if number == plan.shard else f"_{number}"
    return f"{AxisName.REPLICATE.value}{after}", f"{AxisName.SHARD.value}{after}"


def divides(dim: str) -> bool:
    """Whether the ranks along a dim of a mesh are those that sharding divides something over."""
    return dim.split("_")[0] == AxisName.SHARD.value


def extent_of(mesh: DeviceMesh) -> int | None:
    """How many data parallel ranks divide a parameter of `mesh`, where they are others than those of the shard axis."""
    told = next((name for name in mesh.mesh_dim_names or () if divides(name) and name != AxisName.SHARD.value), None)
    return None if told is None else int(told.split("_")[1])


def data_places(mesh: DeviceMesh, *, data: int) -> dict[str, int]:
    """Where data parallel rank `data` stands among those that repeat a parameter of `mesh` and those that divide it, by
    the names of an extent's dims; none of the plan's own axes."""
    number = extent_of(mesh)
    if number is None:
        return {}
    return {f"{AxisName.REPLICATE.value}_{number}": data // number, f"{AxisName.SHARD.value}_{number}": data % number}
