"""Optimizers as their papers write them, on whole tensors of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.optimizer import Adafactor, Moments, Muon, Optimizer, OptimizerSpec, Sgd

KINDS: dict[str, type[Optimizer]] = {"adamw": OptimizerSpec, "muon": Muon, "sgd": Sgd, "adafactor": Adafactor}


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """How one parameter steps: by `rule`, at `rate`, decaying by `decay`."""

    rule: Optimizer
    rate: float
    decay: float


def own(name: str, parameter: Tensor, spec: Optimizer) -> Own:
    """What groups say of a parameter, the first of those that name it and say it; else what holds for its shape."""
    groups = [group for group in spec.groups if any(fnmatchcase(name, pattern) for pattern in group.names)]
    factors = [g.learning_rate_factor for g in groups if g.learning_rate_factor is not None]
    decays = [g.weight_decay for g in groups if g.weight_decay is not None]
    kinds = [str(g.kind) for g in groups if g.kind is not None]
    small = is_small(name, parameter)
    usual = "adamw" if spec.kind == "muon" and (small or name.startswith("head.")) else spec.kind
    kind = (*kinds, usual)[0]
    if kind == "muon" and (parameter.dim() < 2 or name.endswith("bias")):
        kind = "adamw"
    made = KINDS[kind]
    shared = {f.name for f in fields(made)} & {f.name for f in fields(spec)} - {"kind", "groups"}
    return Own(
        rule=made(**{field: getattr(spec, field) for field in shared}),
        rate=spec.learning_rate * (*factors, 1.0)[0],
        decay=(*decays, 0.0 if small else spec.weight_decay)[0],
    )


def is_small(name: str, parameter: Tensor) -> bool:
    """No matrix: norms, biases, sinks, and what embeds."""
    return parameter.dim() < 2 or name.startswith("embedding.") or name.endswith("bias")


def update(name: str, parameter: Tensor, gradient: Tensor, spec: Optimizer, state: dict[str, Any], step: int) -> None:
    """One step of `spec` on one parameter, a stack of matrices one by one; then moments of two bytes are rounded."""
    how = own(name, parameter, spec)
    rule, decay, rate = how.rule, how.decay, how.rate
    if isinstance(rule, Muon):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.copy_(rule.momentum * momentum + gradient)
        ahead = gradient + rule.momentum * momentum
        matrices = [orthogonal(x, rule.steps) for x in (ahead if ahead.dim() > 2 else [ahead])]
        change = 0.2 * math.sqrt(max(parameter.shape[-2:])) * torch.stack(matrices).view_as(parameter)
        parameter.copy_(parameter * (1.0 - rate * decay) - rate * change)
    elif isinstance(rule, OptimizerSpec):
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        first.copy_(rule.beta1 * first + (1.0 - rule.beta1) * gradient)
        second.copy_(rule.beta2 * second + (1.0 - rule.beta2) * gradient.square())
        fair_first, fair_second = first / (1.0 - rule.beta1**step), second / (1.0 - rule.beta2**step)
        parameter.copy_(parameter * (1.0 - rate * decay) - rate * fair_first / (fair_second.sqrt() + rule.epsilon))
        if rule.state is Moments.BF16:
            for moment in (first, second):
                moment.copy_(moment.bfloat16())
    elif isinstance(rule, Sgd):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.copy_(rule.momentum * momentum + gradient + decay * parameter)
        parameter.copy_(parameter - rate * momentum)
    else:
        parameter.copy_(parameter * (1.0 - rate * decay))
        matrices = [parameter], [gradient]
        if parameter.dim() > 2:
            matrices = list(parameter), list(gradient)
        for part, (matrix, slope) in enumerate(zip(*matrices, strict=True)):
            matrix -= rate * factored(slope, rule, state.setdefault(str(part), {}), step)


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
