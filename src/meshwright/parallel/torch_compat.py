"""Every private part of torch that this room uses, in one file; torch 2.11 to 2.13."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


def gather_ahead(modules: Sequence[FSDPModule]) -> None:
    """Each of `modules`, in the order they run, starts to gather the next one's parameters before it computes.

    On a processor FSDP2 gathers and then computes unless it is told so; accelerators overlap by streams already.
    """
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
    for module in modules:
        module._set_unshard_async_op(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCalls:
    """What a stage tells while it runs.

    `pass_done(forward, microbatch, start, seconds)` after each pass, on time.perf_counter()'s clock;
    `before_backward(last)` before each backward, `last` for the step's last one; `reduce()` after that one.
    """

    pass_done: Callable[[bool, int, float, float], None]
    before_backward: Callable[[bool], None]
    reduce: Callable[[], None]
    clock: Callable[[], float]


PATIENT_SENDS = 2


class TableStage(PipelineStage):
    """A pipeline stage of torch's runtime with static shapes, short-lived buffers, and `calls` around its passes.

    torch keeps a receive buffer for every microbatch, and what was sent until the step ends. Here a buffer lives from
    the receive to the pass that uses it, and what was sent lives until its gradient is back or, for a gradient, until
    PATIENT_SENDS later ones are sent. What a pass raises comes out as it was raised. `module` is never a wrapper that
    torch's runtime treats apart (FSDP, DDP): what data parallel ranks do is said by `calls`.
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
        self._calls = calls
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
        start = self._calls.clock()
        with _as_raised():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._calls.pass_done(True, fwd_chunk_id, start, self._calls.clock() - start)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self._calls.before_backward(last_backward)
        # The gradient is back, so the next stage has what was sent to it.
        _wait(self._sent.pop(bwd_chunk_id, []))
        start = self._calls.clock()
        with _as_raised():
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        self._calls.pass_done(False, bwd_chunk_id, start, self._calls.clock() - start)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        assert grad_scale_factor == 1, "losses are sums: gradients are never divided here"
        if self.has_backward:
            self._calls.reduce()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._fill(self.args_recv_info[fwd_chunk_id], self._received)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._fill(self.grad_recv_info[bwd_chunk_id], self._returned)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends, and leaves nothing for the runtime to send."""
        self._sent[fwd_chunk_id] = _batch_p2p(super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends, and leaves nothing for the runtime to send."""
        self._sent_back.append(_batch_p2p(super().get_bwd_send_ops(bwd_chunk_id)))
        while len(self._sent_back) > PATIENT_SENDS:
            _wait(self._sent_back.popleft())
        return []

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
        needs_grad = self.has_backward and torch.is_grad_enabled()
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

    The runtime adds the sends and receives. The last stage returns its loss, and gradients are not scaled.
    """
    runtime = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=_the_loss, scale_grads=False)
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(actions, format="compute_only")
    return runtime


def _the_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output


def held_part(whole: Tensor, like: DTensor) -> Tensor:
    """The part of `whole` that this rank keeps in the layout of `like`: a view."""
    shape, start = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, offset) in enumerate(zip(shape, start, strict=True)):
        whole = whole.narrow(dim, offset if size else 0, size)
    return whole


def forget_compiled(module: nn.Module) -> None:
    """`module.compile()` never happened; there is no public way back."""
    module._compiled_call_impl = None
