"""Every private part of torch that this room uses, in one file; torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor, _redistribute, debug
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree

# torch 2.13 renames both; 2.11 has the old names only.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def store_of_ranks() -> dist.Store:
    """Where the ranks of the default process group found each other."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside have no memory until their module is given some; a fake mode outside does not see them."""
    with unset_fake_temporarily(), torch.device("meta"):
        yield


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Every tensor is multiplied in place, in few kernels."""
    torch._foreach_mul_(list(tensors), factor)


def gather_ahead(modules: Sequence[FSDPModule], *, root: FSDPModule) -> None:
    """Each of `modules`, in the order they run under `root`, starts to gather the next one's parameters before it
    computes, and those of modules inside it. These gather none: they run again where a layer is computed again.

    On a processor FSDP2 gathers and then computes unless it is told so; accelerators overlap by streams already.
    """
    outer = [(root, []), *_with_inner(modules)]
    for (module, inner), following in zip(outer, [[after] for after, _ in outer[1:]] + [[]], strict=True):
        module.set_modules_to_forward_prefetch([*inner, *following])
    for module in (root, *modules):
        module._set_unshard_async_op(True)


def gather_back(modules: Sequence[FSDPModule], *, root: FSDPModule, still: Sequence[nn.Module] = ()) -> None:
    """In backward each of `modules`, in the order they run forward under `root`, starts to gather the one before it,
    but for those under `still` ones, where backward does not come.

    FSDP2 follows the order of past forwards: from the first module, where several microbatches went forward, back to
    the last one, whose parameters are gathered and dropped. The first one names itself here, which gathers nothing.
    """
    order = [*(entry for module, inner in _with_inner(modules) for entry in (*inner, module)), root]
    apart = {id(inner) for module in still for inner in module.modules()}
    for before, module in pairwise(order):
        module.set_modules_to_backward_prefetch([module if id(before) in apart else before])
    order[0].set_modules_to_backward_prefetch([order[0]])


def _with_inner(modules: Sequence[FSDPModule]) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    """Each of `modules` that lies in no other one, with those inside it."""
    inside = {id(inner): id(module) for module in modules for inner in _below(module)}
    for module in modules:
        if id(module) not in inside:
            yield module, [inner for inner in modules if inside.get(id(inner)) == id(module)]


def _below(module: FSDPModule) -> Iterator[nn.Module]:
    assert isinstance(module, nn.Module)
    yield from (inner for inner in module.modules() if inner is not module)


def meets_shards(error: RuntimeError) -> bool:
    """Whether `error` is what torch says where a whole tensor and a sharded parameter meet in one function."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def gradients_formed(module: FSDPModule) -> None:
    """The gradients of `module`'s own group are all there without a backward that ended in it: they are reduced and the
    parameters freed, as its settings say.

    Replicas sum their shards once, at the end, so that each reduction before has to be of the same parameters: those
    that no backward reached since the one before count as zero.
    """
    for group in _groups(module):
        trained = [entry for entry in group.fsdp_params if entry.sharded_param.requires_grad]
        without = [entry for entry in trained if not _has_gradient(entry)]
        reached = len(without) < len(trained) or group.all_reduce_grads
        filled = isinstance(group.mesh_info, HSDPMeshInfo) and group.reduce_grads and reached
        # Those that came with the input's gradient are kept in the precision of the reduction already.
        _fill(group, without if filled else ())
        group.post_backward()


def _groups(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    yield from (group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None)


def watch_passes(
    module: FSDPModule,
    forward: Callable[[], None],
    backward: Callable[[], None],
    reduces: Callable[[], None],
    *,
    used: Callable[[nn.Parameter], None],
) -> None:
    """The first three are called ahead of what `module`'s own parameters do: before they are gathered for a forward, or
    for a backward, and before their gradients are reduced; `used` with each that got a gradient.

    A reduction after a forward is of all that train: those without a gradient count as zero, since another rank may
    have one.
    """
    for group in _groups(module):
        _watch(group, forward, backward, reduces, used)


def _watch(group: Any, forward: Any, backward: Any, reduces: Any, used: Any) -> None:
    pre_forward, pre_backward, post_backward = group.pre_forward, group.pre_backward, group.post_backward
    ran = False

    def before_forward(*args: Any) -> Any:
        nonlocal ran
        ran = ran or torch.is_grad_enabled()
        forward()
        return pre_forward(*args)

    def before_backward(*args: Any) -> Any:
        if group._training_state is not TrainingState.PRE_BACKWARD:
            backward()
        return pre_backward(*args)

    def before_reduction(*args: Any) -> Any:
        nonlocal ran
        trained = [entry for entry in group.fsdp_params if entry.sharded_param.requires_grad] if ran else []
        found = [entry for entry in trained if _has_gradient(entry)]
        for entry in found:
            used(entry.sharded_param)
        if trained and group.reduce_grads:
            ran = False
            reduces()
            if len(found) < len(trained):
                _fill(group, [entry for entry in trained if entry not in found])
        return post_backward(*args)

    group.pre_forward, group.pre_backward, group.post_backward = before_forward, before_backward, before_reduction


def _fill(group: Any, without: Sequence[Any]) -> None:
    """Gradients of `without` are zero, and all of the group in the precision of its reduction."""
    for entry in without:
        entry.unsharded_param.grad = torch.zeros_like(entry.unsharded_param)
    for entry in group.fsdp_params:
        entry.accumulate_unsharded_grad_if_needed()
        entry.to_accumulated_grad_if_needed()


def summed_gradients(units: Sequence[FSDPModule]) -> Iterator[Tensor]:
    """Gradients of whole parameters that `units` add up and do not reduce yet."""
    for group in chain.from_iterable(map(_groups, units)):
        if group.reduce_grads:
            continue
        for entry in group.fsdp_params:
            found = entry.unsharded_accumulated_grad
            if found is None and hasattr(entry, "_unsharded_param"):
                found = entry._unsharded_param.grad
            if found is not None:
                yield found


def _has_gradient(entry: Any) -> bool:
    return entry.unsharded_accumulated_grad is not None or entry.unsharded_param.grad is not None


def backward_formed(root: FSDPModule) -> None:
    """As at the end of a backward of `root`: groups whose gradients nobody called formed are, and all is waited for."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def multiply_scaled(
    left: Tensor, right: Tensor, *, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left right^T (m, n) of numbers in eight bits (m, k) and (n, k), times scales () or of rows, (m, 1) and (n, 1).

    k and n are multiples of 16. Sums are in fp32. torch's public name for it is newer than 2.11.
    """
    found: Tensor = torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale.t().contiguous(), out_dtype=dtype
    )
    return found


def unflattened(mesh: DeviceMesh, dim: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """`mesh` with `dim` as several dims, the last varying fastest, and groups along those. Collective over all
    processes, and of one root with `mesh`: shards go beside them."""
    return mesh._unflatten(dim, sizes, names)


def told_start(x: DTensor) -> tuple[int, ...]:
    """Where the part that this rank keeps of x begins in the whole, as torch tells it."""
    _, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(int(first) for first in start)


def forget_layouts() -> None:
    """Torch works every layout of distributed tensors out anew.

    What it keeps holds meshes, and is found by any mesh that looks the same: by one over the same ranks too, whose
    groups are others. Ranks that keep unlike layouts would then meet in unlike groups.
    """
    # torch 2.11 has not all of them.
    known = (debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")
    for module, name in known:
        getattr(module, name, _nothing)()
    _redistribute._gen_transform_infos.cache_clear()


def _nothing() -> None:
    """Nothing was kept."""


def forget_compiled(module: nn.Module) -> None:
    """`module.compile()` never happened; there is no public way back."""
    module._compiled_call_impl = None


def moved_shard(placement: Any, dim: int) -> Any:
    """The same strided shard of another dim; FSDP2 makes it where the tensor axis divides dim 0 too."""
    return type(placement)(dim, split_factor=placement.split_factor)


def split_factor(placement: Any) -> int:
    """How many parts that the tensor axis made a strided shard divides; 1 of any other placement."""
    return int(getattr(placement, "split_factor", 1))


def with_local(x: Tensor, local: Tensor) -> Tensor:
    """`local` in the layout of x, on whatever device: FSDP2 keeps its offloaded shards so, and no public way does."""
    return DTensor(local, x._spec, requires_grad=False) if isinstance(x, DTensor) else local


def plain(x: Tensor) -> Tensor:
    """x without its own way of calling torch's functions: the same memory, the same place in the graph."""
    if type(x) is Tensor:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns of tensors as they are, whatever their own ways of calling it."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


@contextmanager
def functions_given(given: Callable[[type, tuple[Any, ...]], tuple[Any, ...]]) -> Iterator[None]:
    """While entered, every torch.autograd.Function is applied to what `given` makes of its class and arguments.

    It is no function of torch's own, so that no mode and no kind of tensor sees it called. `apply` of a class may be
    held under another name, and looks up the one beneath it in every call.
    """
    beneath: Any = _SingleLevelFunction

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        above: Any = super(beneath, kind)
        return above.apply(*given(kind, args), **kwargs)

    beneath.apply = classmethod(apply)
    try:
        yield
    finally:
        del beneath.apply


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` of tuples, lists, dicts and registered classes with `function` of every leaf."""
    return _pytree.tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """What such a `tree` holds."""
    return _pytree.tree_leaves(tree)
