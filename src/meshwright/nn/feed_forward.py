"""Feed-forward: two matrices and an activation between, or three when gated (2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn.context import Context
from meshwright.nn.linear import Linear
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Activation, FeedForward


def activation(kind: Activation) -> Callable[[Tensor], Tensor]:
    """The function that `kind` names."""
    if kind is Activation.SILU:
        return functional.silu
    if kind is Activation.GELU:
        return functional.gelu
    if kind is Activation.GELU_TANH:
        return _gelu_tanh
    return torch.relu if kind is Activation.RELU else _relu_squared


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


class DenseFeedForward(Weighted):
    """down(act(gate(x)) * up(x)) when gated, down(act(up(x))) otherwise."""

    def __init__(self, spec: FeedForward) -> None:
        super().__init__()
        self.gate = Linear(spec.width, spec.hidden, bias=spec.bias) if spec.gated else None
        self.up = Linear(spec.width, spec.hidden, bias=spec.bias)
        self.down = Linear(spec.hidden, spec.width, bias=spec.bias)
        self.act = activation(spec.activation)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, s, width) from normed (b, s, width)."""
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(hidden)
