"""Experts: the feed-forwards of a mixture, stacked, and the products that take each row through its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.feed_forward import Hidden
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Mixture

# One kernel for the products of all experts; torch has it since 2.10.
_grouped: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None)
_ROW_BYTES = 16  # rows of its operands begin at multiples of this


class Experts(Weighted):
    """All experts of one layer that are here: matrices stacked on the first dim, each applied to the rows given to it.

    `first` is the number of the first one in the layer.
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

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """(n, width) from rows (n, width) sorted by expert, `counts[e]` of them for expert e.

        Every parameter has a gradient afterwards, also where there is no row.
        """
        if suits_grouped(rows, (self.up.shape[-2], self.up.shape[-1])):
            return self.together(rows, counts)
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
            hidden = functional.linear(x, ups[expert], up_biases[expert])
            gate = gates[expert]
            if gate is None:
                hidden = self.hidden(None, hidden)
            else:
                hidden = self.hidden(functional.linear(x, gate, gate_biases[expert]), hidden)
            results.append(functional.linear(hidden, downs[expert], down_biases[expert]))
        return torch.cat(results)

    def together(self, rows: Tensor, counts: Tensor) -> Tensor:
        """One kernel for a product of all experts, and no number that the host waits for."""
        ends = counts.cumsum(0).to(torch.int32)
        owners = None
        if self.up_bias is not None:
            numbers = torch.arange(len(counts), device=rows.device)
            owners = numbers.repeat_interleave(counts, output_size=len(rows))
        hidden = self._product(rows, self.up, self.up_bias, ends, owners)
        if self.gate is None:
            hidden = self.hidden(None, hidden)
        else:
            hidden = self.hidden(self._product(rows, self.gate, self.gate_bias, ends, owners), hidden)
        return self._product(hidden, self.down, self.down_bias, ends, owners)

    def _product(
        self, rows: Tensor, stacked: Tensor, bias: Tensor | None, ends: Tensor, owners: Tensor | None
    ) -> Tensor:
        assert _grouped is not None
        result: Tensor = Dense.apply(_grouped(rows, self.read(stacked).transpose(-2, -1), offs=ends))
        return result if bias is None or owners is None else result + self.read(bias)[owners]

    def _split(self, stacked: Tensor | None) -> Sequence[Tensor | None]:
        """One tensor per expert: unbind, so that backward writes the stacked gradient once."""
        return [None] * self.num_experts if stacked is None else self.read(stacked).unbind(0)


def suits_grouped(rows: Tensor, sizes: tuple[int, int]) -> bool:
    """Whether torch's grouped product is the faster way: bf16 on an accelerator, rows of aligned bytes."""
    aligned = all(size * rows.element_size() % _ROW_BYTES == 0 for size in sizes)
    return _grouped is not None and rows.device.type == "cuda" and rows.dtype is torch.bfloat16 and aligned


class Dense(torch.autograd.Function):
    """x as it is; its gradient in memory of its own: the grouped product refuses expanded ones."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
