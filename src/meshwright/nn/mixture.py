"""Mixture of experts: every token through a few of many feed-forwards, none dropped unless the routing says so."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.nn.context import Context
from meshwright.nn.experts import Experts
from meshwright.nn.feed_forward import DenseFeedForward
from meshwright.nn.linear import Linear
from meshwright.nn.norm import build_norm
from meshwright.nn.routing import Neighbours, Routed, route, settle
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Mixture


class Mixing(Protocol):
    """How tokens meet their experts. A layout sets another one where experts lie on several ranks."""

    def __call__(self, experts: Experts, tokens: Tensor, routed: Routed) -> Tensor:
        """(T, width): every token's weighted sum of what its experts make of it."""


class MixtureOfExperts(Weighted):
    """Router, experts, and a shared branch that takes every token (dropless, 2211.15841; see `spec.routing`).

    `balance` (experts,), the bias of choices, is state of the run: no optimizer steps it. `chosen` counts how often
    experts were chosen in passes that make gradients since it was last None. A layout that divides sequences sets
    `neighbours`; `each` is what one sequence weighs in the loss of a step.
    """

    def __init__(self, spec: Mixture) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(spec.width, spec.experts, bias=spec.router_bias)
        self.router_norm, self.expert_norm = build_norm(spec.router_norm), build_norm(spec.expert_norm)
        self.expert_scale = nn.Parameter(torch.empty(spec.experts)) if spec.expert_scale else None
        self.experts = Experts(spec)
        self.shared = DenseFeedForward(spec.shared) if spec.shared else None
        self.shared_gate = Linear(spec.width, 1, bias=False) if spec.shared_gate else None
        self.balance: Tensor | None
        self.register_buffer("balance", torch.zeros(spec.experts) if spec.routing.bias_rate else None)
        self.mixing: Mixing = mix
        self.neighbours: Neighbours | None = None
        self.each = 1.0
        self.chosen: Tensor | None = None
        self._newest: Tensor | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, s, width) from (b, s, width), normed where the layer has a norm before."""
        read = x if self.expert_norm is None else self.expert_norm(x)
        out = self.mixing(self.experts, read.flatten(0, 1), self._route(x, context)).view_as(x)
        if self.shared is None:
            return out
        extra = self.shared(x, context)
        return out + (extra if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * extra)

    def tally(self) -> None:
        """The newest pass is counted; a pass that is computed again for backward is not."""
        if self._newest is not None and torch.is_grad_enabled():
            self.chosen = self._newest if self.chosen is None else self.chosen + self._newest
        self._newest = None

    def _route(self, x: Tensor, context: Context) -> Routed:
        outputs = self.router((x if self.router_norm is None else self.router_norm(x)).flatten(0, 1))
        outputs = outputs if self.spec.router_scale == 1.0 else outputs * self.spec.router_scale
        routed = route(outputs, self.spec, bias=self.balance, dtype=x.dtype)
        if self.expert_scale is not None:
            routed.weights = routed.weights * self.read(self.expert_scale)[routed.chosen]
        if torch.is_grad_enabled():
            self._newest = routed.counts
        settle(
            routed,
            self.spec,
            sequences=x.shape[0],
            neighbours=self.neighbours,
            context=context,
            tally=None if context.tallies is None else context.tallies.of(id(self)),
            each=self.each,
        )
        return routed


def mix(experts: Experts, tokens: Tensor, routed: Routed) -> Tensor:
    """All experts are here."""
    order, counts = by_expert(routed, experts=experts.num_experts)
    sending = routed.sending(order)
    return sending.sums(experts(sending.rows(tokens), counts), tokens)


def by_expert(routed: Routed, *, experts: int) -> tuple[Tensor, Tensor]:
    """Places in the flat choices that are kept, sorted by expert and then by token, and how many each expert has."""
    flat = routed.chosen.flatten()
    if routed.kept is None:
        return flat.argsort(stable=True), routed.counts
    flat = torch.where(routed.kept.flatten(), flat, experts)
    counts = routed.kept_counts(flat, experts=experts)
    return flat.argsort(stable=True)[: int(counts.sum())], counts
