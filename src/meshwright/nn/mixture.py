"""Mixture of experts: `top_k` feed-forwards per token, none dropped (dropless, 2211.15841)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.context import Context
from meshwright.nn.feed_forward import DenseFeedForward, activation
from meshwright.nn.linear import Linear, Product
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Mixture


class Experts(Weighted):
    """All experts of one layer: matrices stacked on the first dim, each applied to the rows given to it."""

    def __init__(self, spec: Mixture) -> None:
        super().__init__()
        wide, narrow = (spec.experts, spec.hidden, spec.width), (spec.experts, spec.width, spec.hidden)
        self.gate = nn.Parameter(torch.empty(wide)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(narrow))
        self.gate_bias = nn.Parameter(torch.empty(wide[:2])) if spec.expert_bias and spec.gated else None
        self.up_bias = nn.Parameter(torch.empty(wide[:2])) if spec.expert_bias else None
        self.down_bias = nn.Parameter(torch.empty(narrow[:2])) if spec.expert_bias else None
        self.num_experts = spec.experts
        self.act = activation(spec.activation)
        self.product: Product = functional.linear

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(n, width) from rows (n, width) sorted by expert, `counts[e]` of them for expert e."""
        gates, ups, downs = self._split(self.gate), self.read(self.up).unbind(0), self.read(self.down).unbind(0)
        gate_biases, up_biases = self._split(self.gate_bias), self._split(self.up_bias)
        down_biases = self._split(self.down_bias)
        results = []
        for expert, x in enumerate(rows.split(counts)):
            if len(x) == 0:
                continue
            hidden = self.product(x, ups[expert], up_biases[expert])
            gate = gates[expert]
            gated = None if gate is None else self.product(x, gate, gate_biases[expert])
            hidden = self.act(hidden) if gated is None else self.act(gated) * hidden
            results.append(self.product(hidden, downs[expert], down_biases[expert]))
        return torch.cat(results)

    def _split(self, stacked: Tensor | None) -> Sequence[Tensor | None]:
        """One tensor per expert: unbind, so that backward writes the stacked gradient once."""
        return [None] * self.num_experts if stacked is None else self.read(stacked).unbind(0)


class MixtureOfExperts(Weighted):
    """Softmax over the `top_k` largest router scores weighs their experts; a shared branch takes every token."""

    def __init__(self, spec: Mixture) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(spec.width, spec.experts, bias=spec.router_bias)
        self.experts = Experts(spec)
        self.shared = DenseFeedForward(spec.shared) if spec.shared else None
        self.shared_gate = Linear(spec.width, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, s, width) from normed (b, s, width)."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        best, chosen = scores.to(torch.promote_types(scores.dtype, torch.float32)).topk(self.spec.top_k, dim=-1)
        weights = best.softmax(dim=-1).to(x.dtype).flatten()
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.experts).tolist()
        source = order // self.spec.top_k
        mixed = self.experts(tokens[source], counts) * weights[order, None]
        out = torch.zeros_like(tokens).index_add(0, source, mixed.to(tokens.dtype)).view_as(x)
        if self.shared is None:
            return out
        extra = self.shared(x, context)
        return out + (extra if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * extra)
