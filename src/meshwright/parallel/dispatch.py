"""Dispatch: tokens meet experts of other ranks. Sent to those chosen (2006.16668), or gathered by all of them.

Ranks hold different tokens. Along `expert` they hold different experts, along `expert_tensor` slices of the same ones:
those are given the same tokens, and what they make of them is summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.nn.experts import Experts
from meshwright.nn.mixture import by_expert
from meshwright.nn.routing import Routed
from meshwright.parallel.collectives import EnterSequence, LeaveSequence, gather_sequence


class Sent(torch.autograd.Function):
    """Rows of x to the ranks of the group, `send[r]` of them to rank r, for `receive[r]` from it; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange_rows(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


class GatheredRows(torch.autograd.Function):
    """The rows of all ranks of the group, rank r's `sizes[r]`, in their order; gradients are summed where they go."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gather_rows(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grads[0], ctx.sizes, ctx.group), None, None


class SummedRows(torch.autograd.Function):
    """This rank's rows of the sum over the group of all rows, rank r's being `sizes[r]`; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return sum_rows(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grads[0], ctx.sizes, ctx.group), None, None


class Ordered(torch.autograd.Function):
    """Rows of x in the order that `order` names, which `back` undoes: backward reads in order too, and adds nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0][back], None, None


def exchange_rows(x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """(sum(receive), ...) from (sum(send), ...)."""
    received = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
    return received


def gather_rows(x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """(sum(sizes), ...) from each rank's rows, of which every rank has another number."""
    own = (len(x),) * group.size()
    return exchange_rows(x.repeat(group.size(), *(1,) * (x.dim() - 1)), own, sizes, group)


def sum_rows(x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks of (sum(sizes), ...)."""
    count = sizes[group.rank()]
    parts = exchange_rows(x, sizes, (count,) * group.size(), group)
    return parts.unflatten(0, (group.size(), count)).sum(dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How many rows go where. `send` and `receive` by rank along `expert`; `sizes` of the ranks along `expert_tensor`;
    `chunks` (slices, ranks, local experts) of the rows that are here in the end, in their order, and `counts` of each
    local expert's."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    sizes: tuple[int, ...]
    chunks: Tensor
    counts: Tensor


def arrivals(counts: Tensor, *, experts: dist.ProcessGroup | None, slices: dist.ProcessGroup | None) -> Arrivals:
    """Every rank tells the others how many rows it has for each of their experts: `counts` (experts,) are its own."""
    holders = 1 if experts is None else experts.size()
    own = counts.view(holders, -1)
    chunks = own
    if experts is not None:
        chunks = torch.empty_like(own)
        dist.all_to_all_single(chunks, own, group=experts)
    every = chunks[None]
    if slices is not None:
        every = gather_sequence(every, slices).unflatten(1, (slices.size(), holders))[0]
    return read(own, chunks, every)


def read(own: Tensor, chunks: Tensor, every: Tensor) -> Arrivals:
    """Of rows that this rank has for others and others for it, (ranks, local experts), and for all slices of these.

    The host waits once, for all numbers together.
    """
    holders = len(own)
    numbers = torch.cat([own.sum(dim=1), chunks.sum(dim=1), every.sum(dim=(1, 2))]).tolist()
    send, receive, sizes = numbers[:holders], numbers[holders : 2 * holders], numbers[2 * holders :]
    totals = every.sum(dim=(0, 1))
    return Arrivals(send=tuple(send), receive=tuple(receive), sizes=tuple(sizes), chunks=every, counts=totals)


class SentToExperts:
    """Each choice travels alone: a row to the rank of its expert, what it makes of it back; weighed where it begins."""

    def __init__(self, *, experts: dist.ProcessGroup | None, slices: dist.ProcessGroup | None) -> None:
        self._experts, self._slices = experts, slices

    @torch.compiler.disable
    def __call__(self, experts: Experts, tokens: Tensor, routed: Routed) -> Tensor:
        """(T, width) from this rank's tokens (T, width); every rank of the grid calls it alike."""
        order, counts = by_expert(routed, experts=experts.num_experts)
        sending = routed.sending(order)
        return sending.sums(self._there_and_back(experts, sending.rows(tokens), counts), tokens)

    def _there_and_back(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        plan = arrivals(counts, experts=self._experts, slices=self._slices)
        if self._experts is not None:
            rows = Sent.apply(rows, plan.send, plan.receive, self._experts)
        if self._slices is not None:
            rows = GatheredRows.apply(rows, plan.sizes, self._slices)
        order, back = _by_local_expert(plan.chunks, total=len(rows))
        results = experts(Ordered.apply(rows, order, back), plan.counts)
        results = Ordered.apply(results, back, order)
        if self._slices is not None:
            results = SummedRows.apply(results, plan.sizes, self._slices)
        if self._experts is not None:
            results = Sent.apply(results, plan.receive, plan.send, self._experts)
        return results


def _by_local_expert(chunks: Tensor, *, total: int) -> tuple[Tensor, Tensor]:
    """The order that sorts rows which lie in `chunks` by expert, stably, and the one that undoes it."""
    owners = torch.arange(chunks.shape[-1], device=chunks.device).expand(chunks.shape).flatten()
    order = owners.repeat_interleave(chunks.flatten(), output_size=total).argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(total, device=order.device))


class GatheredByExperts:
    """Every rank has the tokens of all ranks of its part of the grid, and sums of what experts made of them go back.

    It moves each token to every rank once, however many experts chose it: less where `top_k` is near the ranks.
    """

    def __init__(
        self,
        *,
        experts: dist.ProcessGroup | None,
        slices: dist.ProcessGroup | None,
        first: int,
        here: int,
        total: int,
    ) -> None:
        self._groups = [group for group in (experts, slices) if group is not None]
        self._first, self._here, self._total = first, here, total

    @torch.compiler.disable
    def __call__(self, experts: Experts, tokens: Tensor, routed: Routed) -> Tensor:
        """As SentToExperts; every rank has as many tokens."""
        chosen = routed.chosen if routed.kept is None else routed.chosen.masked_fill(~routed.kept, self._total)
        every, weights = tokens, routed.weights
        for group in self._groups:
            every, weights = (EnterSequence.apply(x[None], group)[0] for x in (every, weights))
            chosen = gather_sequence(chosen[None], group)[0]
        local = chosen.flatten() - self._first
        local = torch.where((local >= 0) & (local < self._here), local, self._here)
        counts = routed.kept_counts(chosen.flatten(), experts=self._total)[self._first : self._first + self._here]
        order = local.argsort(stable=True)[: int(counts.sum())]
        sending = replace(routed, chosen=chosen, weights=weights).sending(order)
        out = sending.sums(experts(sending.rows(every), counts), every)
        for group in reversed(self._groups):
            out = LeaveSequence.apply(out[None], group)[0]
        return out
