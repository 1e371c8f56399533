"""Feed-forward: two matrices and an activation between, or three when gated (2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn.context import Context
from meshwright.nn.linear import Linear
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Activation, FeedForward

SLOPE, LIMIT = 1.702, 7.0  # of the clamped activation


class Hidden:
    """The hidden features of a part: act(gate) * up when it is gated, act(up) otherwise."""

    def __init__(self, kind: Activation) -> None:
        self.clamped = kind is Activation.CLAMPED_SWIGLU
        self.act = functional.silu if self.clamped else activation(kind)

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Any shape; `gate` None where there is none."""
        if gate is None:
            return self.act(up)
        if self.clamped:
            made: Tensor = _ClampedSwiglu.apply(gate, up)
            return made
        return self.act(gate) * up


def activation(kind: Activation) -> Callable[[Tensor], Tensor]:
    """The function of one factor that `kind` names. Raises ValueError for one that takes two."""
    if kind is Activation.CLAMPED_SWIGLU:
        raise ValueError(f"{kind.value} takes a gate and another factor")
    if kind is Activation.SILU:
        return functional.silu
    if kind is Activation.GELU:
        return functional.gelu
    if kind is Activation.GELU_TANH:
        return _gelu_tanh
    return torch.relu if kind is Activation.RELU else _relu_squared


class _ClampedSwiglu(torch.autograd.Function):
    """g sigmoid(SLOPE g) (u + 1) with g and u clamped (gpt-oss); backward keeps the two factors and forms the rest."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        clamped = gate.clamp(max=LIMIT)
        return clamped * torch.sigmoid(SLOPE * clamped) * (up.clamp(min=-LIMIT, max=LIMIT) + 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        clamped = gate.clamp(max=LIMIT)
        share = torch.sigmoid(SLOPE * clamped)
        to_up = (grads[0] * clamped).mul_(share).masked_fill_(up.abs() > LIMIT, 0.0)
        slope = clamped.mul_(SLOPE).mul_(1.0 - share).add_(1.0).mul_(share)
        to_gate = up.clamp(min=-LIMIT, max=LIMIT).add_(1.0).mul_(grads[0]).mul_(slope)
        return to_gate.masked_fill_(gate > LIMIT, 0.0), to_up


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
        self.hidden = Hidden(spec.activation)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, s, width) from normed (b, s, width)."""
        made = self.project(x, [part for part in (self.gate, self.up) if part is not None])
        return self.down(self.hidden(None if self.gate is None else next(made), next(made)))
