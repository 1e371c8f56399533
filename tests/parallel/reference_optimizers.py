"""Optimizers as their papers write them, on whole tensors of one device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec, Sgd


def is_small(name: str, parameter: Tensor) -> bool:
    """No matrix: norms, biases, sinks, and what embeds."""
    return parameter.dim() < 2 or name.startswith("embedding.") or name.endswith("bias")


def update(
    name: str, parameter: Tensor, gradient: Tensor, spec: Optimizer, state: dict[str, Tensor], step: int
) -> None:
    """One step of `spec` on one parameter, a stack of matrices one by one."""
    small = is_small(name, parameter)
    decay, rate = (0.0 if small else spec.weight_decay), spec.learning_rate
    if isinstance(spec, Muon) and not small and not name.startswith("head."):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.copy_(spec.momentum * momentum + gradient)
        ahead = gradient + spec.momentum * momentum
        matrices = [orthogonal(x, spec.steps) for x in (ahead if ahead.dim() > 2 else [ahead])]
        change = 0.2 * math.sqrt(max(parameter.shape[-2:])) * torch.stack(matrices).view_as(parameter)
        parameter.copy_(parameter * (1.0 - rate * decay) - rate * change)
    elif isinstance(spec, (OptimizerSpec, Muon)):
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        first.copy_(spec.beta1 * first + (1.0 - spec.beta1) * gradient)
        second.copy_(spec.beta2 * second + (1.0 - spec.beta2) * gradient.square())
        fair_first, fair_second = first / (1.0 - spec.beta1**step), second / (1.0 - spec.beta2**step)
        parameter.copy_(parameter * (1.0 - rate * decay) - rate * fair_first / (fair_second.sqrt() + spec.epsilon))
    elif isinstance(spec, Sgd):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.copy_(spec.momentum * momentum + gradient + decay * parameter)
        parameter.copy_(parameter - rate * momentum)
    else:
        parameter.copy_(parameter * (1.0 - rate * decay))
        parts = range(len(parameter)) if parameter.dim() > 2 else [...]
        for part in parts:
            own = state.setdefault(str(part), {})  # type: ignore[arg-type]  # one state a matrix
            parameter[part] -= rate * factored(gradient[part], spec, own, step)  # type: ignore[index, arg-type]


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """Muon's iteration, always on the wide side."""
    wide = x.T if x.shape[0] > x.shape[1] else x
    y = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        y = 3.4445 * y - 4.7750 * (y @ y.T) @ y + 2.0315 * (y @ y.T) @ (y @ y.T) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def factored(gradient: Tensor, spec: Adafactor, state: dict[str, Tensor], step: int) -> Tensor:
    """Adafactor's update of a vector or a matrix: algorithms 4 and 5 of the paper, without scaling by the parameter."""
    kept = 1.0 - step**-spec.decay_exponent
    squares = gradient.square() + spec.epsilon_squared
    if gradient.dim() == 1:
        state["square"] = kept * state.get("square", 0.0) + (1.0 - kept) * squares
        second = state["square"]
    else:
        state["row"] = kept * state.get("row", 0.0) + (1.0 - kept) * squares.mean(1)
        state["column"] = kept * state.get("column", 0.0) + (1.0 - kept) * squares.mean(0)
        second = torch.outer(state["row"], state["column"]) / state["row"].mean()
    change = gradient / second.sqrt()
    return change / max(1.0, float(change.square().mean().sqrt()) / spec.clip_update)
