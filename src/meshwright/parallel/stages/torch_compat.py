"""Private torch of the pipeline's runtime: stages that follow a table of passes; torch 2.11 to 2.13."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _PipelineScheduleRuntime

from meshwright.schedule.moves import PATIENT_SENDS


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


class Reach(StrEnum):
    """How far backward goes through a stage: on to the one before it, to its own parameters, or not at all."""

    WHOLE = "whole"
    OWN = "own"
    STILL = "still"


class TableStage(PipelineStage):
    """A pipeline stage of torch's runtime with static shapes, short-lived buffers, and `calls` around its passes.

    torch makes a receive buffer for every microbatch before the first step and keeps it, and what was sent until the
    step ends. Here a buffer lives from the receive to the pass that uses it, and what was sent lives until its gradient
    is back or, for a gradient, until PATIENT_SENDS later ones are sent. Backward goes as far as `reach` says. What a
    pass raises comes out as it was raised. `module` is never a wrapper that torch's runtime treats apart (FSDP, DDP):
    what data parallel ranks do is said by `calls`.
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
        if not self.is_first:
            self.args_recv_info = _Emptied(self._empty)
        if not self.is_last:
            self.grad_recv_info = _Emptied(self._empty)
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

    def _post_metadata_inference_cleanup(self) -> None:
        """Shapes are static: nothing ran that would have to be undone, and gradients are not to be dropped."""

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """The stage's own module checks what it sends; torch 2.11 would also check the loss."""


class _Emptied(dict[int, Any]):
    """Places of receive buffers by microbatch, each emptied as it comes: those of all would not fit."""

    def __init__(self, empty: Callable[[Sequence[Any]], None]) -> None:
        super().__init__()
        self._empty = empty

    def __setitem__(self, microbatch: int, places: Sequence[Any]) -> None:
        self._empty(places)
        super().__setitem__(microbatch, places)


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
