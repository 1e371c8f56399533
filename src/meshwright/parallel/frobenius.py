"""Frobenius decay: factors decay as their product would (2105.01029), in place of weight decay of each.

Of half the square of ||U V||_F the gradients are U V V^T and U^T U V. They are added to those of the loss in backward,
where a rank has what it needs of both: no byte is sent for them. What tensor ranks find of the factor that they all
hold whole is a summand, as all of its gradient is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.attention import GroupedAttention
from meshwright.nn.low_rank import FactoredLinear
from meshwright.schedule import planned
from meshwright.spec.plan import Design


def decay_of(design: Design) -> float:
    """How strongly products of factors decay; 0 where each factor decays by itself."""
    return 0.0 if design.job.factoring is None else design.job.factoring.frobenius_decay


def decay_products(unit: nn.Module, design: Design, *, stage: int) -> None:
    """Every product of factors under `unit` decays, each time that it goes backward by its share of a step."""
    plan = design.plan
    share = decay_of(design) / (plan.data * plan.context * planned.passes(plan.schedule, stage))
    if not share:
        return
    for name, module in unit.named_modules():
        if isinstance(module, FactoredLinear):
            module.register_forward_hook(partial(_after, share=share / _copies(unit, name, tensor=plan.tensor)))


def _copies(unit: nn.Module, name: str, *, tensor: int) -> int:
    """How many of the tensor ranks that sum the gradients of a factor have the same rows of the product `name`."""
    mixer = unit.get_submodule("mixer") if name in ("mixer.key", "mixer.value") else None
    return max(tensor // mixer.spec.kv_heads, 1) if isinstance(mixer, GroupedAttention) else 1


def _after(module: FactoredLinear, _inputs: tuple[Tensor, ...], output: Tensor, *, share: float) -> Tensor:
    if not torch.is_grad_enabled():
        return output
    decayed: Tensor = _Decayed.apply(output, *_read(module), module, share)
    return decayed


def _read(module: FactoredLinear) -> tuple[Tensor, Tensor]:
    return module.up.read(module.up.weight), module.down.read(module.down.weight)


class _Decayed(torch.autograd.Function):
    """What a product gives out, as it is. Factors are read again in backward, so that nothing is kept for it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _up: Tensor, _down: Tensor, module: FactoredLinear, share: float) -> Tensor:
        ctx.module, ctx.share = module, share
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            up, down = _read(ctx.module)
            pull_up, pull_down = up @ (down @ down.T), (up.T @ up) @ down
        return gradients[0], pull_up.mul_(ctx.share), pull_down.mul_(ctx.share), None, None
