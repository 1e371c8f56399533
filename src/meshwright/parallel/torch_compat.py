"""Every private part of torch that this room uses, in one file; torch 2.11 to 2.13."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree

# torch 2.13 renames both; 2.11 has the old names only.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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


def gradients_formed(module: FSDPModule) -> None:
    """The gradients of `module`'s own group are all there without a backward that ended in it: they are reduced and the
    parameters freed, as its settings say.

    Replicas sum their shards once, at the end, so that each reduction before has to be of the same parameters: those
    that no backward reached since the one before count as zero.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is None:
            continue
        trained = [entry for entry in group.fsdp_params if entry.sharded_param.requires_grad]
        without = [entry for entry in trained if not _has_gradient(entry)]
        reached = len(without) < len(trained) or group.all_reduce_grads
        if isinstance(group.mesh_info, HSDPMeshInfo) and group.reduce_grads and reached:
            for entry in without:
                entry.unsharded_param.grad = torch.zeros_like(entry.unsharded_param)
        for entry in group.fsdp_params:
            # Those that came with the input's gradient are kept in the precision of the reduction already.
            entry.accumulate_unsharded_grad_if_needed()
            entry.to_accumulated_grad_if_needed()
        group.post_backward()


def _has_gradient(entry: Any) -> bool:
    return entry.unsharded_accumulated_grad is not None or entry.unsharded_param.grad is not None


def backward_formed(root: FSDPModule) -> None:
    """As at the end of a backward of `root`: groups whose gradients nobody called formed are, and all is waited for."""
    root._get_fsdp_state()._root_post_backward_final_callback()


class StageCalls(Protocol):
    """What a stage does around its passes. A pass is one of torch's chunks: a microbatch, or a slice of one."""

    def before_forward(self, index: int) -> None: ...

    def after_forward(self, index: int) -> None: ...

    def backward(self, index: int, output: Tensor, gradient: Tensor | None, *, whole: bool, last: bool) -> None:
        """Backward of pass `index` from `output` of the gradient (None: 1); the half that gives the input's gradient
        unless `whole`. `last`: no other backward or `weights` follows in this step.
        """

    def weights(self, index: int, *, last: bool) -> None:
        """The other half."""

    def reduce(self) -> None:
        """Called after the last of both."""


PATIENT_SENDS = 2


class Reach(StrEnum):
    """How far backward goes through a stage: on to the one before it, to its own parameters, or not at all."""

    WHOLE = "whole"
    OWN = "own"
    STILL = "still"


class TableStage(PipelineStage):
    """A pipeline stage of torch's runtime with static shapes, short-lived buffers, and `calls` around its passes.

    torch keeps a receive buffer for every microbatch, and what was sent until the step ends. Here a buffer lives from
    the receive to the pass that uses it, and what was sent lives until its gradient is back or, for a gradient, until
    PATIENT_SENDS later ones are sent. Backward goes as far as `reach` says. What a pass raises comes out as it was
    raised. `module` is never a wrapper that torch's runtime treats apart (FSDP, DDP): what data parallel ranks do is
    said by `calls`.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        example_input: Tensor,
        example_output: Tensor,
        calls: StageCalls,
        reach: Reach,
    ) -> None:
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=(example_input,),
            output_args=(example_output,),
            group=group,
        )
        self._calls, self._reach = calls, reach
        self._received = example_input
        self._returned = example_output
        self._sent: dict[int, list[dist.Work]] = {}
        self._sent_back: deque[list[dist.Work]] = deque()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        self._calls.before_forward(fwd_chunk_id)
        with _as_raised():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._calls.after_forward(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        # The gradient is back, so the next stage has what was sent to it.
        _wait(self._sent.pop(bwd_chunk_id, []))
        (output,), inputs = self.fwd_cache.pop(bwd_chunk_id)
        if self._reach is Reach.STILL:
            return
        gradient = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)[0]
        self._calls.backward(bwd_chunk_id, output, gradient, whole=full_backward, last=last_backward)
        if self._reach is Reach.WHOLE:
            self.bwd_cache[bwd_chunk_id] = (inputs[0].grad,)
        if self.is_last:
            output.detach_()  # torch keeps the losses until the step ends

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward and self._reach is not Reach.STILL:
            self._calls.weights(bwd_chunk_id, last=last_backward)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self._goes_on else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward and self._reach is not Reach.STILL:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        assert grad_scale_factor == 1, "losses are sums: gradients are never divided here"
        if self.has_backward:
            self._calls.reduce()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._fill(self.args_recv_info[fwd_chunk_id], self._received)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self._reach is Reach.STILL:
            return []
        if self.has_backward and not self.is_last:
            self._fill(self.grad_recv_info[bwd_chunk_id], self._returned)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends, and leaves nothing for the runtime to send."""
        self._sent[fwd_chunk_id] = _batch_p2p(super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends, and leaves nothing for the runtime to send."""
        if not self._goes_on:
            return []
        self._sent_back.append(_batch_p2p(super().get_bwd_send_ops(bwd_chunk_id)))
        while len(self._sent_back) > PATIENT_SENDS:
            _wait(self._sent_back.popleft())
        return []

    @property
    def _goes_on(self) -> bool:
        return self.has_backward and self._reach is Reach.WHOLE

    def finish(self) -> None:
        """Everything sent has arrived and nothing of the step is kept."""
        for works in (*self._sent.values(), *self._sent_back):
            _wait(works)
        self._sent.clear()
        self._sent_back.clear()
        self.clear_runtime_states()

    def _fill(self, places: Sequence[Any], like: Tensor) -> None:
        for place in places:
            place.buffer = torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def _take(self, places: Sequence[Any]) -> tuple[Tensor, ...]:
        taken = tuple(place.buffer for place in places)
        self._empty(places)
        return taken

    def _empty(self, places: Sequence[Any]) -> None:
        for place in places:
            place.buffer = torch.empty(0, device=self.device)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        needs_grad = self._goes_on and torch.is_grad_enabled()
        return tuple(x.detach().requires_grad_(needs_grad) for x in self._take(self.args_recv_info[fwd_chunk_id]))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        return self._take(self.grad_recv_info[bwd_chunk_id])

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        if not self.is_first:
            for places in self.args_recv_info.values():
                self._empty(places)
        return prepared

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for places in self.grad_recv_info.values():
            if not self.is_last:
                self._empty(places)
        return prepared

    def _post_metadata_inference_cleanup(self) -> None:
        """Shapes are static: nothing ran that would have to be undone, and gradients are not to be dropped."""

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """The stage's own module checks what it sends; torch 2.11 would also check the loss."""


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


@contextmanager
def _as_raised() -> Iterator[None]:
    """torch wraps what a pass raises in a RuntimeError that tells tensors; the failure itself is more use."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def table_runtime(stages: Sequence[TableStage], *, rows: Sequence[Sequence[str]], microbatches: int) -> Any:
    """torch's pipeline runtime for `stages` of this rank, which runs `rows`: cells like `0F3`, one row a rank.

    Sends and receives are added where rows tell none. The last stage returns its loss; gradients are not scaled.
    """
    runtime = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=_the_loss, scale_grads=False)
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    if any("SEND" in cell for row in rows for cell in row):
        runtime.pipeline_order_with_comms = actions
    else:
        runtime._prepare_schedule_with_comms(actions, format="compute_only")
    return runtime


def _the_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output


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


def held_part(whole: Tensor, like: DTensor) -> Tensor:
    """The part of `whole` that this rank keeps in the layout of `like`: a view."""
    shape, start = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, offset) in enumerate(zip(shape, start, strict=True)):
        whole = whole.narrow(dim, offset if size else 0, size)
    return whole


def held_start(x: DTensor) -> tuple[int, ...]:
    """Where the part that this rank keeps of x begins in the whole."""
    _, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(int(first) for first in start)


def forget_compiled(module: nn.Module) -> None:
    """`module.compile()` never happened; there is no public way back."""
    module._compiled_call_impl = None


def moved_shard(placement: Any, dim: int) -> Any:
    """The same strided shard of another dim; FSDP2 makes it where the tensor axis divides dim 0 too."""
    return type(placement)(dim, split_factor=placement.split_factor)


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


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` of tuples, lists, dicts and registered classes with `function` of every leaf."""
    return _pytree.tree_map(function, tree)
