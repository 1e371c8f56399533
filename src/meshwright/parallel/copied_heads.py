"""Key-value heads of which there are fewer than tensor ranks: several ranks in a row hold the same head.

Each such rank attends with its own query heads to its copy of one key-value head, so that what it finds of the head's
gradient is one summand, which the holders add up among themselves. The tensor axis is two dims there, head and copy:
parameters of keys and values are divided along the first and repeated along the second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from meshwright.parallel.torch_compat import unflattened
from meshwright.spec.plan import AxisName

_HEADS, _COPIES = "tensor_heads", "tensor_copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """How parameters of `heads` key-value heads lie on more tensor ranks: on `mesh`, of which the last dim repeats
    them. One head is on all of the tensor axis, and its mesh the axis itself."""

    heads: int
    mesh: DeviceMesh

    @property
    def copies(self) -> int:
        """Tensor ranks that hold the same head."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def among(self) -> dist.ProcessGroup:
        """The holders of this rank's head, over whom a gradient of it is a sum."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Of a parameter whose `dim` the heads divide."""
        return (Replicate(),) if self.heads == 1 else (Shard(dim), Replicate())

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of it."""
        head = 0 if self.heads == 1 else self.mesh.get_local_rank(0)
        return whole.chunk(self.heads, dim=dim)[head].clone(memory_format=torch.contiguous_format)


def copied_heads(root: DeviceMesh, *, tensor: int, kv_heads: Collection[int]) -> dict[int, Copied]:
    """Of each number of key-value heads that `tensor` ranks on a line have copies of, how they lie on `root`.

    Collective over all processes; those that are not on `root` get nothing.
    """
    found, line, is_there = {}, AxisName.TENSOR.value, root.get_coordinate() is not None
    for heads in sorted(kv_heads):
        if heads >= tensor or tensor % heads:
            continue
        names: tuple[str, ...] = (line,)
        held = root
        if heads > 1:
            names = (f"{_HEADS}_{heads}", f"{_COPIES}_{heads}")
            held = unflattened(root, line, (heads, tensor // heads), names)
        if is_there:
            found[heads] = Copied(heads=heads, mesh=held[names])
    return found


def places_on(mesh: DeviceMesh, places: Mapping[str, int]) -> dict[str, int]:
    """Where this rank stands on the tensor axis, `places` of it, as the dims of a parameter's `mesh` say it."""
    apart = [name for name in mesh.mesh_dim_names or () if name.startswith((_HEADS, _COPIES))]
    return {name: mesh.get_local_rank(name) for name in apart} or dict(places)
