"""Data parallel: what the shard axis divides, by FSDP2, and how the gradients of a part meet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.nn.experts import Experts
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.expert_mesh import SHARD
from meshwright.parallel.experts import Together, dim_of_shards, expert_gradients, expert_parameters
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.precision import Dtypes
from meshwright.parallel.synchronize import ShardedGradients, Synchronizer
from meshwright.parallel.torch_compat import gather_ahead
from meshwright.spec.plan import AxisName, Sharding


class ExchangeReduceScatter:
    """Reduce-scatter as all-to-all and a local sum: gloo's own moves twice the bytes (plugs into FSDP2)."""

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "gradients are summed, never averaged"
        parts = input_tensor.view(group.size(), -1)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        torch.sum(received, dim=0, out=output_tensor.view(-1))


def is_sharded(sharding: Sharding, mesh: Mesh) -> bool:
    """There is something to shard and someone to share it with."""
    return sharding is not Sharding.NONE and mesh.size(AxisName.SHARD) > 1


def experts_are_sharded(sharding: Sharding, mesh: Mesh) -> bool:
    """Experts lie on a grid of their own, on which something is left to share them."""
    return mesh.experts is not None and is_sharded(sharding, mesh) and mesh.experts.size(SHARD) > 1


def shard_module(module: nn.Module, *, mesh: Mesh, sharding: Sharding, dtypes: Dtypes) -> None:
    """The parameters under `module` that no shard holds yet are one FSDP2 group over the data parallel ranks.

    Experts on a grid of their own are left as they are.
    """
    submesh = mesh.along(AxisName.REPLICATE, AxisName.SHARD)
    assert submesh is not None
    apart = expert_parameters(module) if mesh.experts is not None else ()
    _shard(module, submesh, sharding=sharding, dtypes=dtypes, apart=apart)


def shard_experts(module: Experts, *, mesh: Mesh, sharding: Sharding, dtypes: Dtypes) -> None:
    """The experts' parameters are one FSDP2 group over the ranks that hold the same ones."""
    assert mesh.experts is not None
    assert mesh.experts.data is not None
    shards = mesh.experts.size(SHARD)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(dim_of_shards(parameter, shards=shards))

    _shard(module, mesh.experts.data, sharding=sharding, dtypes=dtypes, placement=placement)


def _shard(
    module: nn.Module,
    submesh: DeviceMesh,
    *,
    sharding: Sharding,
    dtypes: Dtypes,
    apart: Collection[nn.Parameter] = (),
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.casts else None,
        reduce_dtype=dtypes.reduce,
        cast_forward_inputs=False,
    )
    reshard = sharding is Sharding.PARAMETERS
    fully_shard(
        module,
        mesh=submesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
        ignored_params=set(apart),
    )
    if submesh.device_type == "cpu":
        assert isinstance(module, FSDPModule)
        module.set_custom_reduce_scatter(ExchangeReduceScatter())  # type: ignore[arg-type]  # the protocol, untyped


def build_synchronizer(part: nn.Module, *, mesh: Mesh, sharding: Sharding, dtypes: Dtypes) -> Synchronizer:
    """How the gradients of `part`, laid out already, meet those of the other data parallel ranks."""
    if mesh.experts is None or experts_are_sharded(sharding, mesh):
        return _dense_synchronizer(part, mesh=mesh, sharding=sharding, dtypes=dtypes)
    dense = _dense_synchronizer(part, mesh=mesh, sharding=sharding, dtypes=dtypes)
    return Together((dense, expert_gradients(part, grid=mesh.experts, dtypes=dtypes)))


def _dense_synchronizer(part: nn.Module, *, mesh: Mesh, sharding: Sharding, dtypes: Dtypes) -> Synchronizer:
    if is_sharded(sharding, mesh):
        assert isinstance(part, FSDPModule)
        if next(part.parameters()).device.type == "cpu":
            gather_ahead([module for module in part.modules() if isinstance(module, FSDPModule)])
        return ShardedGradients(part, sharding=sharding)
    groups = [mesh.group(axis) for axis in (AxisName.REPLICATE, AxisName.SHARD)]
    present = tuple(group for group in groups if group is not None)
    dtype = dtypes.reduce if dtypes.reduce is not dtypes.master else None
    apart = set(expert_parameters(part)) if mesh.experts is not None else set()
    held = [parameter for parameter in part.parameters() if parameter not in apart]
    return BucketedGradients(held, groups=present, dtype=dtype)
