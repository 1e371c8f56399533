"""Routing: from a router's outputs to the experts of every token, their weights, and how evenly they are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.nn.context import Context, Tally
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
    choice is dropped; None where none is. `share` of them are kept where experts are chosen alike. `scores`
    (T, experts) in fp32 at the least, parts of one, are there where a loss balances them. `weigh_inputs` as Routing
    says.
    """

    chosen: Tensor
    weights: Tensor
    counts: Tensor
    kept: Tensor | None = None
    share: float = 1.0
    scores: Tensor | None = None
    weigh_inputs: bool = False

    def sending(self, order: Tensor) -> Sending:
        """What meets experts where `order` (n,) are places in the flat (T, k), sorted by expert."""
        source = order // self.chosen.shape[-1]
        return Sending(order=order, source=source, weights=self.weights, weigh_inputs=self.weigh_inputs)

    def kept_counts(self, flat: Tensor, *, experts: int) -> Tensor:
        """(experts,): how many of `flat` choices (n,) each expert has; those of number `experts` are dropped."""
        return torch.bincount(flat, minlength=experts + 1)[:experts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Choices counted in the order of positions, of all that one pass holds of each sequence: `places` (b, s, k), how
    many of the same expert there are up to each choice, itself among them, and `counts` (b, experts), of all."""

    places: Tensor
    counts: Tensor


class Neighbours(Protocol):
    """The ranks that hold the other parts of the same sequences, when a layout divides them."""

    @property
    def parts(self) -> int:
        """How many ranks divide a sequence."""

    def counted(self, chosen: Tensor, *, experts: int, context: Context) -> Counted:
        """The choices (b, s, k) of this rank among those of all of them. Collective."""

    def everywhere(self, counts: Tensor) -> Tensor:
        """The sum of `counts` of all of them. Collective."""


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
    how = spec.routing
    return Routed(
        chosen=chosen,
        weights=weights.to(dtype),
        counts=counts,
        share=how.kept_share,
        scores=parts,
        weigh_inputs=how.weigh_inputs,
    )


def _within_groups(ranked: Tensor, *, groups: int, chosen: int) -> Tensor:
    """`ranked` (T, experts) with the experts outside each token's best groups below all others."""
    grouped = ranked.unflatten(-1, (groups, -1))
    best = grouped.topk(min(_BEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    open_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(chosen, dim=-1).indices, True)
    return grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(-2)


def settle(
    routed: Routed,
    spec: Mixture,
    *,
    sequences: int,
    neighbours: Neighbours | None,
    context: Context,
    tally: Tally | None,
    each: float,
) -> None:
    """What counts choices along whole sequences: those beyond the capacity are not kept, and backward minimises the
    loss that balances them, of which one sequence weighs `each`. Slices of sequences have a `tally`."""
    how = spec.routing
    balances = routed.scores is not None and torch.is_grad_enabled()
    if how.capacity is None and not balances:
        return
    rows = routed.chosen.unflatten(0, (sequences, -1))
    length = context.length or rows.shape[1] * (1 if neighbours is None else neighbours.parts)
    if how.capacity is None:
        counts = counts_by_sequence(rows, experts=spec.experts)
        counts = counts if neighbours is None else neighbours.everywhere(counts)
    else:
        if neighbours is None:
            found = counted(rows, experts=spec.experts)
        else:
            found = neighbours.counted(rows, experts=spec.experts, context=context)
        counts, places = found.counts, found.places
        if tally is not None:
            before = tally.before(like=counts)
            places = places + before.gather(1, rows.flatten(1)).view_as(rows)
        room = math.ceil(how.capacity * length * spec.top_k / spec.experts)
        routed.kept = (places <= room).flatten(0, 1)
    if tally is not None:
        tally.add(counts)
    if balances:
        factor = each * how.balance_loss * spec.experts / (length * length * spec.top_k)
        routed.weights = Balanced.apply(routed.weights, routed.scores, counts, factor, tally)


def counts_by_sequence(rows: Tensor, *, experts: int) -> Tensor:
    """How often each sequence chose each expert: int64 (b, experts) from (b, s, k)."""
    flat = rows.flatten(1)
    return torch.zeros(len(flat), experts, dtype=torch.int64, device=flat.device).scatter_add_(
        1, flat, torch.ones_like(flat)
    )


def counted(rows: Tensor, *, experts: int) -> Counted:
    """Choices (b, s, k) in the order of positions, those of a token of different experts."""
    flat = rows.flatten(1)
    counts = counts_by_sequence(rows, experts=experts)
    by_expert, order = flat.sort(dim=1, stable=True)
    first = (counts.cumsum(dim=1) - counts).gather(1, by_expert)
    places = torch.arange(1, flat.shape[1] + 1, device=flat.device) - first
    return Counted(places=torch.empty_like(flat).scatter_(1, order, places).view_as(rows), counts=counts)


class Balanced(torch.autograd.Function):
    """The weights of choices as they are; backward also minimises factor * sum_e n_e p_e, where n_e is how often a
    sequence chose expert e and p_e the sum of its scores (tokens, experts).

    `counts` are of this pass. Where sequences come in slices their `tally` has those of all in the end: slices go
    backward when all have gone forward.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, scores: Tensor, counts: Tensor, factor: float, tally: Tally | None
    ) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.factor, ctx.tally, ctx.kind = factor, tally, (scores.dtype, scores.shape)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dtype, (tokens, _) = ctx.kind
        (counts,) = ctx.saved_tensors if ctx.tally is None else (ctx.tally.total(),)
        counts = counts.to(dtype) * ctx.factor
        return grads[0], counts.repeat_interleave(tokens // len(counts), dim=0), None, None, None
