"""How a distributed tensor is cut over ranks, and sums over them: what optimizers of whole matrices need to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.parallel.torch_compat import moved_shard, split_factor, told_start, with_local


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """`dim`, of `extent` elements before this cut, is divided over the ranks of `group` in runs of equal length.

    The last ranks have less or nothing where it does not divide.
    """

    dim: int
    extent: int
    group: dist.ProcessGroup

    def length(self, rank: int) -> int:
        """Elements that `rank` of the group has."""
        each = -(-self.extent // self.group.size())
        return max(0, min(each, self.extent - rank * each))

    def start(self, rank: int) -> int:
        """Where they begin."""
        return min(rank * -(-self.extent // self.group.size()), self.extent)


def cuts(x: Tensor) -> tuple[Cut, ...]:
    """How x is cut, the last cut first: joining what the ranks hold in this order makes it whole."""
    if not isinstance(x, DTensor):
        return ()
    extents = list(x.shape)
    found = []
    for place in reversed(range(x.device_mesh.ndim)):
        placement = x.placements[place]
        if placement.is_replicate() or x.device_mesh.size(place) == 1:
            continue
        dim = _divided(placement)
        cut = Cut(dim=dim, extent=extents[dim], group=x.device_mesh.get_group(place))
        found.append(cut)
        extents[dim] = cut.length(x.device_mesh.get_local_rank(place))
    return tuple(reversed(found))


def as_part(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, of: Tensor) -> DTensor:
    """`local` as this rank's part of a tensor of the shape of `of`, which it may share unevenly with others."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=of.shape, stride=of.stride())


def held_start(x: DTensor) -> tuple[int, ...]:
    """Where the part that this rank keeps of x begins in the whole.

    Where the tensor axis divides rows unevenly and shards divide what each of its ranks has, torch tells of other
    shards than there are: it takes the tensor ranks' parts for equal.
    """
    if not is_uneven(x):
        return told_start(x)
    first = [0] * x.dim()
    for cut in cuts(x):
        first[cut.dim] += cut.start(cut.group.rank())
    return tuple(first)


def held_part(whole: Tensor, like: DTensor) -> Tensor:
    """The part of `whole` that this rank keeps in the layout of `like`: a view."""
    sizes = like.to_local().shape
    for dim, (size, first) in enumerate(zip(sizes, held_start(like), strict=True)):
        whole = whole.narrow(dim, first if size else 0, size)
    return whole


def is_uneven(x: DTensor) -> bool:
    """The ranks inside a strided shard have unequal parts of the dim that it divides."""
    return any(x.shape[_divided(place)] % split for place in x.placements if (split := split_factor(place)) > 1)


def zeros_as(x: Tensor) -> Tensor:
    """Zeros laid out as x is."""
    with torch.no_grad():
        local = x.to_local() if isinstance(x, DTensor) else x
    return with_local(x, torch.zeros_like(local, memory_format=torch.preserve_format))


def without_dim(x: Tensor, dim: int) -> Tensor:
    """Zeros of x's shape without `dim`, laid out as x is; repeated over the ranks that divide `dim`."""
    local = x.to_local() if isinstance(x, DTensor) else x
    zeros = torch.zeros(_without(local.shape, dim), dtype=x.dtype, device=local.device)
    if not isinstance(x, DTensor):
        return zeros
    shape = torch.Size(_without(x.shape, dim))
    stride = torch.empty(shape, device="meta").stride()
    placements = [_moved(placement, dim) for placement in x.placements]
    return DTensor.from_local(zeros, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _divided(placement: Placement) -> int:
    """The dim that a placement divides, which is not replicated."""
    dim: int = placement.dim  # type: ignore[attr-defined]  # Shard and torch's strided one share no public type
    return dim


def _moved(placement: Placement, dim: int) -> Placement:
    if placement.is_replicate():
        return placement
    divided = _divided(placement)
    if divided == dim:
        return Replicate()
    if type(placement) is Shard:
        return Shard(divided - (divided > dim))
    return moved_shard(placement, divided - (divided > dim))


def sum_over(
    values: Sequence[tuple[Tensor, Sequence[dist.ProcessGroup]]], *, device: torch.device | None = None
) -> None:
    """Every tensor is summed in place over each of its groups, in one collective a group; on `device` where they lie
    elsewhere. Collective."""
    groups: dict[str, tuple[dist.ProcessGroup, list[Tensor]]] = {}
    for tensor, over in values:
        for group in over:
            groups.setdefault(group.group_name, (group, []))[1].append(tensor)
    for group, tensors in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
