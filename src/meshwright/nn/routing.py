"""Routing: from a router's outputs to the experts of every token, their weights, and how evenly they are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.spec.model import Choice, Mixture, Score, Weighing

_BEST_OF_GROUP = 2  # experts whose scores make the score of their group


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Choices in the order of their experts: `order` among all choices, and `source`, the token of each."""

    order: Tensor
    source: Tensor
    weights: Tensor
    weigh_inputs: bool

    def rows(self, tokens: Tensor) -> Tensor:
        """(n, width): what experts read of tokens (T, width)."""
        rows = tokens[self.source]
        return (rows * self._weights()).to(rows.dtype) if self.weigh_inputs else rows

    def sums(self, results: Tensor, tokens: Tensor) -> Tensor:
        """(T, width) as `tokens`: for each of them the sum of what its experts gave, of (n, width)."""
        mixed = results if self.weigh_inputs else results * self._weights()
        return torch.zeros_like(tokens).index_add(0, self.source, mixed.to(tokens.dtype))

    def _weights(self) -> Tensor:
        return self.weights.flatten()[self.order, None]


@dataclass(slots=True, kw_only=True)
class Routed:
    """Where T tokens go: the experts of each, int64 (T, k), and their weights (T, k).

    `counts` (experts,) is how many choices each expert has, dropped ones among them. `kept` (T, k) is False where a
    choice is dropped; None where none is. `scores` (T, experts) in fp32 at the least, parts of one, are there where a
    loss balances them. `weigh_inputs` as Routing says.
    """

    chosen: Tensor
    weights: Tensor
    counts: Tensor
    kept: Tensor | None = None
    scores: Tensor | None = None
    weigh_inputs: bool = False

    def sending(self, order: Tensor) -> Sending:
        """What meets experts where `order` (n,) are places in the flat (T, k), sorted by expert."""
        source = order // self.chosen.shape[-1]
        return Sending(order=order, source=source, weights=self.weights, weigh_inputs=self.weigh_inputs)


class Neighbours(Protocol):
    """The ranks that hold the other parts of the same sequences, when a layout divides them."""

    @property
    def parts(self) -> int:
        """How many ranks divide a sequence."""

    def before(self, counts: Tensor) -> Tensor:
        """The sum of `counts` of the ranks that hold earlier parts."""

    def everywhere(self, counts: Tensor) -> Tensor:
        """The sum of `counts` of all of them."""


def route(outputs: Tensor, spec: Mixture, *, bias: Tensor | None, dtype: torch.dtype) -> Routed:
    """The choices of a router's `outputs` (T, experts), weights in `dtype`; `bias` (experts,) counts for choice alone.

    Scores are computed in fp32 at the least.
    """
    wide, how = outputs.to(torch.promote_types(outputs.dtype, torch.float32)), spec.routing
    if how.choice is Choice.PROTOTYPES:
        return _prototypes(wide, spec, bias=bias, dtype=dtype)
    usual = how.score is Score.SOFTMAX and how.weighing is Weighing.NORMALIZED
    if usual and bias is None and how.groups == 1 and not how.balance_loss:
        best, chosen = wide.topk(spec.top_k, dim=-1)
        return _routed(chosen, best.softmax(dim=-1), spec, dtype=dtype)
    scores = wide.softmax(dim=-1) if how.score is Score.SOFTMAX else wide.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if how.groups > 1:
        ranked = _within_groups(ranked, groups=how.groups, chosen=how.chosen_groups)
    chosen = ranked.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if how.weighing is Weighing.NORMALIZED:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return _routed(chosen, weights, spec, dtype=dtype, scores=scores)


def _prototypes(wide: Tensor, spec: Mixture, *, bias: Tensor | None, dtype: torch.dtype) -> Routed:
    size = spec.experts // spec.top_k
    scores = wide.unflatten(-1, (spec.top_k, size)).softmax(dim=-1)
    ranked = scores.detach() if bias is None else scores.detach() + bias.view(spec.top_k, size)
    inside = ranked.argmax(dim=-1, keepdim=True)
    weights = scores.gather(-1, inside).squeeze(-1)
    chosen = inside.squeeze(-1) + torch.arange(0, spec.experts, size, device=inside.device)
    return _routed(chosen, weights, spec, dtype=dtype, scores=scores.flatten(-2))


def _routed(
    chosen: Tensor, weights: Tensor, spec: Mixture, *, dtype: torch.dtype, scores: Tensor | None = None
) -> Routed:
    weights = weights if spec.routing.scale == 1.0 else weights * spec.routing.scale
    counts = torch.bincount(chosen.flatten(), minlength=spec.experts)
    if scores is None or not spec.routing.balance_loss:
        scores = None
    parts = None if scores is None else scores / scores.sum(dim=-1, keepdim=True)
    inputs = spec.routing.weigh_inputs
    return Routed(chosen=chosen, weights=weights.to(dtype), counts=counts, scores=parts, weigh_inputs=inputs)


def _within_groups(ranked: Tensor, *, groups: int, chosen: int) -> Tensor:
    """`ranked` (T, experts) with the experts outside each token's best groups below all others."""
    grouped = ranked.unflatten(-1, (groups, -1))
    best = grouped.topk(min(_BEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    open_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(chosen, dim=-1).indices, True)
    return grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(-2)


def counts_by_sequence(chosen: Tensor, *, sequences: int, experts: int) -> Tensor:
    """How often each sequence chose each expert: int64 (sequences, experts) from (T, k), sequence by sequence."""
    rows = chosen.view(sequences, -1)
    return torch.zeros(sequences, experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        1, rows, torch.ones_like(rows)
    )


def within_capacity(chosen: Tensor, spec: Mixture, *, sequences: int, neighbours: Neighbours | None) -> Tensor:
    """Which choices (T, k) their experts have room for, in the order of positions in a sequence."""
    assert spec.routing.capacity is not None
    parts = neighbours.parts if neighbours is not None else 1
    length = parts * len(chosen) // sequences
    room = math.ceil(spec.routing.capacity * length * spec.top_k / spec.experts)
    rows = chosen.view(sequences, -1, chosen.shape[-1])
    taken = torch.zeros(*rows.shape[:2], spec.experts, dtype=torch.int64, device=chosen.device)
    taken = taken.scatter_(-1, rows, 1).cumsum(dim=1)
    if neighbours is not None:
        taken = taken + neighbours.before(taken[:, -1])[:, None]
    return (taken.gather(-1, rows) <= room).view_as(chosen)


def balance_loss(routed: Routed, spec: Mixture, *, sequences: int, neighbours: Neighbours | None) -> Tensor:
    """What `Routing.balance_loss` adds for these tokens: a number for every sequence, summed."""
    assert routed.scores is not None
    counts = counts_by_sequence(routed.chosen, sequences=sequences, experts=spec.experts)
    parts = 1
    if neighbours is not None:
        counts, parts = neighbours.everywhere(counts), neighbours.parts
    length = parts * len(routed.chosen) // sequences
    share = counts.to(routed.scores.dtype) / (length * spec.top_k)
    mean = routed.scores.unflatten(0, (sequences, -1)).sum(dim=1) / length
    return spec.routing.balance_loss * spec.experts * (share * mean).sum()


class Beside(torch.autograd.Function):
    """x as it is; backward also minimises `loss`, times `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.kind = factor, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.kind
        return grads[0], torch.full((), ctx.factor, dtype=dtype, device=device), None
