"""Collectives inside the model as autograd functions: enter and leave a region where each rank holds a part.

The gradient of each is another of them, so that gradients of gradients meet too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.torch_compat import all_gather_single, reduce_scatter_single


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A new tensor, the sum of x over the group."""
    summed = x.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, n * s, ...) from each rank's (b, s, ...), in rank order."""
    ranks = group.size()
    parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    all_gather_single(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (ranks, x.shape[0])).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, s / n, ...): this rank's share of the sum over ranks of (b, s, ...).

    On gloo as all-to-all and a local sum: its reduce-scatter moves twice the bytes.
    """
    ranks = group.size()
    parts = x.unflatten(1, (ranks, x.shape[1] // ranks)).transpose(0, 1).contiguous()
    if x.device.type == "cpu":
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received.sum(dim=0)
    result = torch.empty_like(parts[0])
    reduce_scatter_single(result, parts, group=group)
    return result


def exchange(own: Tensor, *, group: dist.ProcessGroup, peer: int) -> Tensor:
    """What rank `peer` of the group has where this one has `own`, which is contiguous; both call it.

    Receives come first: gloo tells that it waits behind what it sends, and one way would wait for the other.
    """
    other = torch.empty_like(own)
    operations = [
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return other


class EnterReplicated(torch.autograd.Function):
    """x as it is; its gradient is summed over the ranks that each used a part of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return LeaveReplicated.apply(grads[0], ctx.group), None


class LeaveReplicated(torch.autograd.Function):
    """The sum of the ranks' partial x; its gradient goes to each rank whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return EnterReplicated.apply(grads[0], ctx.group), None


class EnterSequence(torch.autograd.Function):
    """The whole sequence from each rank's part of it; gradients are summed and each rank keeps its part's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return LeaveSequence.apply(grads[0], ctx.group), None


class LeaveSequence(torch.autograd.Function):
    """This rank's part of the sequence of the ranks' summed x; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return EnterSequence.apply(grads[0], ctx.group), None


class SumShared(torch.autograd.Function):
    """The sum over ranks of x, used by each rank for its own part: gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return SumShared.apply(grads[0], ctx.group), None


class GatherColumns(torch.autograd.Function):
    """The ranks' x one after another along the last dim; all use it alike, so each keeps its part's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ranks = group.size()
        parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        all_gather_single(parts, x.contiguous(), group=group)
        return torch.cat(parts.chunk(ranks), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return OwnColumns.apply(grads[0], ctx.group), None


class OwnColumns(torch.autograd.Function):
    """This rank's run of x, that all ranks hold alike, along the last dim; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return GatherColumns.apply(grads[0], ctx.group), None
