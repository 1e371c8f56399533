"""Experts: the feed-forwards of a mixture, stacked, and the products that take each row through its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.nn.feed_forward import Hidden
from meshwright.nn.grouped import GroupedProduct, grouped_product, suits_grouped
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Mixture


class Experts(Weighted):
    """All experts of one layer that are here: matrices stacked on the first dim, each applied to the rows given to it.

    `grouped` makes the products of all in one kernel; a layout sets another, or None where each is made by itself.
    """

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
        self.hidden = Hidden(spec.activation)
        self.grouped: GroupedProduct | None = grouped_product

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """(n, width) from rows (n, width) sorted by expert, `counts[e]` of them for expert e.

        Every parameter has a gradient afterwards, also where there is no row.
        """
        if self.grouped is not None and suits_grouped(rows, (self.up.shape[-2], self.up.shape[-1])):
            return self.together(self.grouped, rows, counts)
        return self.one_by_one(rows, counts.tolist())

    def one_by_one(self, rows: Tensor, counts: list[int]) -> Tensor:
        """A product for each expert that has rows."""
        gates, ups, downs = self._split(self.gate), self.read(self.up).unbind(0), self.read(self.down).unbind(0)
        gate_biases, up_biases = self._split(self.gate_bias), self._split(self.up_bias)
        down_biases = self._split(self.down_bias)
        busy = [expert for expert, count in enumerate(counts) if count] or [0]
        parts = rows.split(counts)
        results = []
        for expert in busy:
            x = parts[expert]
            hidden = self.multiply(x, ups[expert], up_biases[expert])
            gate = gates[expert]
            if gate is None:
                hidden = self.hidden(None, hidden)
            else:
                hidden = self.hidden(self.multiply(x, gate, gate_biases[expert]), hidden)
            results.append(self.multiply(hidden, downs[expert], down_biases[expert]))
        return torch.cat(results)

    def together(self, grouped: GroupedProduct, rows: Tensor, counts: Tensor) -> Tensor:
        """One kernel for a product of all experts, and no number that the host waits for."""

        def product(x: Tensor, stacked: Tensor, bias: Tensor | None) -> Tensor:
            result = grouped(x, self.read(stacked), ends)
            return result if bias is None or owners is None else result + self.read(bias)[owners]

        ends = counts.cumsum(0).to(torch.int32).to(rows.device)
        owners = None
        if self.up_bias is not None:
            owners = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        hidden = product(rows, self.up, self.up_bias)
        if self.gate is None:
            hidden = self.hidden(None, hidden)
        else:
            hidden = self.hidden(product(rows, self.gate, self.gate_bias), hidden)
        return product(hidden, self.down, self.down_bias)

    def _split(self, stacked: Tensor | None) -> Sequence[Tensor | None]:
        """One tensor per expert: unbind, so that backward writes the stacked gradient once."""
        return [None] * self.num_experts if stacked is None else self.read(stacked).unbind(0)
