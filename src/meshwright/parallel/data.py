"""Data parallel: what the shard axis divides, by FSDP2, and how the gradients of a part meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.nn.experts import Experts
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.clip import local_part
from meshwright.parallel.compress import Rounding, sent_elements
from meshwright.parallel.expert_mesh import SHARD
from meshwright.parallel.experts import Together, dim_of_shards, expert_gradients, expert_parameters
from meshwright.parallel.extents import divides, extent_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.precision import Dtypes
from meshwright.parallel.reduce_scatter import CompressedReduceScatter, ExchangeReduceScatter
from meshwright.parallel.reduction import Travel
from meshwright.parallel.shard_buckets import ShardBuckets
from meshwright.parallel.synchronize import ShardedGradients, Synchronizer
from meshwright.parallel.torch_compat import gather_ahead, gather_back
from meshwright.spec.plan import AxisName, Offload, Sharding


def is_sharded(sharding: Sharding, mesh: Mesh) -> bool:
    """There is something to shard and someone to share it with."""
    return sharding is not Sharding.NONE and mesh.divided_size > 1


def experts_are_sharded(sharding: Sharding, mesh: Mesh) -> bool:
    """Experts lie on a grid of their own, on which something is left to share them."""
    return mesh.experts is not None and is_sharded(sharding, mesh) and mesh.experts.size(SHARD) > 1


def shard_module(
    module: nn.Module,
    *,
    mesh: Mesh,
    sharding: Sharding,
    dtypes: Dtypes,
    offload: Offload = Offload.NONE,
    shards: int | None = None,
) -> None:
    """The parameters under `module` that no shard holds yet are one FSDP2 group over the data parallel ranks, or over
    those that shard where replicas round or compress what they send; so many `shards` in place of the shard axis' where
    told.

    Experts on a grid of their own are left as they are. Where `offload` says so, shards lie in the host's memory.
    """
    whole = dtypes.meets_whole
    if shards is None:
        submesh = mesh.along(*((AxisName.REPLICATE, AxisName.SHARD) if whole else (AxisName.SHARD,)))
    else:
        submesh = mesh.extents[shards].both if whole else mesh.extents[shards].shards
    assert submesh is not None
    apart = expert_parameters(module) if mesh.experts is not None else ()
    _shard(module, submesh, sharding=sharding, dtypes=dtypes, apart=apart, offload=offload)


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
    offload: Offload = Offload.NONE,
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.casts else None,
        reduce_dtype=dtypes.reduce,
        cast_forward_inputs=False,
    )
    reshard = sharding is Sharding.PARAMETERS
    rounds = dtypes.wire is not None and submesh.size() > 1
    fresh = _sharded_now(module) if rounds else []
    fully_shard(
        module,
        mesh=submesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
        ignored_params=set(apart),
        offload_policy=_host_policy(submesh) if offload is Offload.PARAMETERS else OffloadPolicy(),
    )
    assert isinstance(module, FSDPModule)
    scatter: ExchangeReduceScatter | None = None
    if dtypes.wire is not None and fresh:
        ranks, like = submesh.size(), fresh[0]
        size = sent_elements(fresh, ranks=ranks)
        rounding = Rounding(size, parts=ranks, dtype=dtypes.reduce, device=like.device, wire=dtypes.wire)
        scatter = CompressedReduceScatter(rounding)
        module.reduction_left = rounding.left
    elif submesh.device_type == "cpu":
        scatter = ExchangeReduceScatter()
    if scatter is not None:
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # the protocol, untyped


def _sharded_now(module: nn.Module) -> list[Tensor]:
    """What this rank has of the parameters that train and that no shard holds yet."""
    return [local_part(p.detach()) for p in module.parameters() if p.requires_grad and not _is_sharded(p)]


def _host_policy(submesh: DeviceMesh) -> OffloadPolicy:
    """Shards come from the host's memory for every gather, their gradients go there, and the optimizer runs there.

    Only CUDA devices need it pinned; on a processor it is the device's own.
    """
    return CPUOffloadPolicy(pin_memory=submesh.device_type == "cuda")


def build_synchronizer(
    part: nn.Module,
    *,
    mesh: Mesh,
    shardings: Mapping[nn.Module, Sharding],
    dtypes: Dtypes,
    sharded: type[ShardedGradients],
    still: Sequence[nn.Module] = (),
) -> Synchronizer:
    """How the gradients of `part`, laid out already, meet those of the other data parallel ranks; in the manner of
    `sharded` where it is, each of its modules by its own of `shardings`. Backward does not come to modules that are
    `still`.
    """
    dense = _dense_synchronizer(part, mesh=mesh, shardings=shardings, dtypes=dtypes, sharded=sharded, still=still)
    if mesh.experts is None or experts_are_sharded(shardings[part], mesh):
        return dense
    return Together((dense, expert_gradients(part, grid=mesh.experts, dtypes=dtypes)))


def _dense_synchronizer(
    part: nn.Module,
    *,
    mesh: Mesh,
    shardings: Mapping[nn.Module, Sharding],
    dtypes: Dtypes,
    sharded: type[ShardedGradients],
    still: Sequence[nn.Module] = (),
) -> Synchronizer:
    if is_sharded(shardings[part], mesh):
        assert isinstance(part, FSDPModule)
        units = [module for module in part.modules() if isinstance(module, FSDPModule) and module is not part]
        gather_back(units, root=part, still=still)
        if next(part.parameters()).device.type == "cpu":
            gather_ahead(units, root=part)
        summed = sharded(part, shardings=shardings)
        if dtypes.meets_whole:
            return summed
        return Together((summed, *_among_replicas(part, mesh=mesh, dtypes=dtypes)))
    groups = [mesh.group(axis) for axis in (AxisName.REPLICATE, AxisName.SHARD)]
    present = tuple(group for group in groups if group is not None)
    dtype = dtypes.reduce if dtypes.reduce is not dtypes.master else None
    apart = set(expert_parameters(part)) if mesh.experts is not None else set()
    held = [parameter for parameter in part.parameters() if parameter not in apart]
    travel = Travel(dtype=dtype, wire=dtypes.wire, compression=dtypes.compression)
    return BucketedGradients(held, groups=present, travel=travel)


def _among_replicas(part: nn.Module, *, mesh: Mesh, dtypes: Dtypes) -> Iterator[ShardBuckets]:
    """How gradients of shards of `part` meet among the ranks that have the same ones, by how many ranks divide them."""
    travel = Travel(wire=dtypes.wire, compression=dtypes.compression)
    over: dict[int | None, list[nn.Parameter]] = {}
    for parameter in part.parameters():
        assert isinstance(parameter, DTensor), "all of a part is sharded, or nothing"
        over.setdefault(extent_of(parameter.device_mesh), []).append(parameter)
    for shards, parameters in over.items():
        replicas = mesh.replicas_of(shards)
        if replicas is not None:
            yield ShardBuckets(parameters, group=replicas, travel=travel)


def residuals(part: nn.Module, synchronizer: Synchronizer) -> tuple[Tensor, ...]:
    """What is kept of gradients that do not travel whole, to be sent with the next ones; live tensors."""
    inside = synchronizer.synchronizers if isinstance(synchronizer, Together) else (synchronizer,)
    bucketed = [x for each in inside if isinstance(each, BucketedGradients) for x in each.residuals()]
    found = (getattr(module, "reduction_left", None) for module in part.modules())
    return (*bucketed, *(left for left in found if isinstance(left, Tensor)))


def _is_sharded(parameter: Tensor) -> bool:
    """An FSDP2 group has it already."""
    if not isinstance(parameter, DTensor):
        return False
    return any(map(divides, parameter.device_mesh.mesh_dim_names or ()))
