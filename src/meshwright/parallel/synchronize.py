"""How the gradients of a stage meet those of the other data parallel ranks, over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.spec.plan import Sharding

BUCKET_BYTES = 64 * 2**20


class Synchronizer(Protocol):
    """Told of every backward of one stage; gradients add up over microbatches and data parallel ranks."""

    def before_backward(self, *, last: bool) -> None:
        """Called before each microbatch's backward; `last` says that no other follows in this step."""

    def after_backward(self) -> None:
        """Called once a step, after the last microbatch's backward: gradients are then those of the whole batch."""

    def after_evaluation(self) -> None:
        """Called after forward passes that no backward follows."""


class ShardedGradients:
    """Gradients of a part under `fully_shard`, by what its sharding divides (ZeRO, 1910.02054).

    ZeRO-1 keeps whole gradients and whole parameters until the step's last backward, and reduces once. ZeRO-2 reduces
    after every microbatch, so that only shards of gradients last. ZeRO-3 also frees parameters after every pass (after
    forward by `reshard_after_forward` of `fully_shard`). The replicate axis, where there is one, is reduced once in
    all three. Gradients are summed, never averaged.
    """

    def __init__(self, part: FSDPModule, *, sharding: Sharding) -> None:
        assert sharding is not Sharding.NONE, "a part that is not sharded has ReplicatedGradients"
        self._part, self._sharding = part, sharding
        assert isinstance(part, nn.Module)
        self._modules = tuple(module for module in part.modules() if isinstance(module, FSDPModule))
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def before_backward(self, *, last: bool) -> None:
        self._part.set_requires_gradient_sync(last or self._sharding is not Sharding.OPTIMIZER)
        self._part.set_requires_all_reduce(last)
        self._part.set_reshard_after_backward(last or self._sharding is Sharding.PARAMETERS)

    def after_backward(self) -> None:
        """Nothing is left: the last backward reduced."""

    def after_evaluation(self) -> None:
        """Parameters are shards again: kept whole they would outlive the optimizer's next update."""
        for module in self._modules:
            module.reshard()


class ReplicatedGradients:
    """Gradients of a part that every data parallel rank holds whole: summed once a step, in `dtype`, bucket by bucket.

    Gradients of distributed tensors are summed by their local parts; their layout is the same on every rank of
    each of `groups`, one after the other. No group means that there is no other rank.
    """

    def __init__(
        self, part: nn.Module, *, groups: Sequence[dist.ProcessGroup], dtype: torch.dtype | None = None
    ) -> None:
        self._part, self._groups, self._dtype = part, tuple(groups), dtype

    def before_backward(self, *, last: bool) -> None:
        """Nothing: gradients add up in place."""

    def after_backward(self) -> None:
        if not self._groups:
            return
        gradients = [_local(parameter.grad) for parameter in self._part.parameters() if parameter.grad is not None]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            wire = flat if self._dtype is None else flat.to(self._dtype)
            for group in self._groups:
                dist.all_reduce(wire, group=group)
            start = 0
            for gradient in bucket:
                gradient.copy_(wire[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()

    def after_evaluation(self) -> None:
        """Nothing: parameters are whole always."""


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of one dtype of at most BUCKET_BYTES, but for a gradient that is larger alone."""
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        full = size + gradient.nbytes > BUCKET_BYTES
        if not buckets or full or buckets[-1][0].dtype is not gradient.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    return buckets
