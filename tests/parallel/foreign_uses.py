"""What a user does beside a plain forward of a module, on one device and on the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.foreign import parallelize
from meshwright.spec.degrees import plan_of_degrees
from tests.parallel.foreign_models import WIDTH
from tests.parallel.user_models import USERS

WEIGHT = 0.1


def number(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def penalty(module: nn.Module) -> Tensor:
    """The sum of squares of all parameters, outside of any forward."""
    return torch.stack([number(x.square().sum()) for x in module.parameters()]).sum()


def two_matrices() -> tuple[nn.Module, Tensor]:
    """With a third that no forward uses."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)).double()
    module.apart = nn.Parameter(torch.ones(4, dtype=torch.float64))
    return module, torch.randn(8, WIDTH, dtype=torch.float64)


def decayed(degrees: dict[str, Any], by_loss: bool) -> dict[str, float]:
    """How far gradients of a loss with a penalty are from those of one device, relative to the largest."""
    (expected, x), (module, _) = two_matrices(), two_matrices()
    (expected(x).square().mean() + WEIGHT * penalty(expected)).backward()
    laid = parallelize(module, plan_of_degrees(precision="fp64", **degrees), example=(x[:1],))
    for place, part in enumerate(x.chunk(laid.mesh.data_size)[laid.mesh.data_coordinate].chunk(2)):
        loss = laid.module(part).square().mean() + (WEIGHT * penalty(laid.module) if by_loss else 0.0)
        laid.backward(loss / 2, last=place == 1)
    if not by_loss:
        with torch.no_grad():
            for parameter in module.parameters():
                held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = held + 2 * WEIGHT * parameter
    return _apart(laid.whole_of, expected, module)


def stepped(kind: str, degrees: dict[str, Any]) -> tuple[dict[str, float], set[str]]:
    """How far gradients of a user's module are from those of one device, relative to the largest, and which matrices
    are divided."""
    (expected, x), (module, _) = _user(kind), _user(kind)
    expected(x).square().sum().backward()
    laid = parallelize(module, plan_of_degrees(precision="fp64", **degrees), example=(x[:1],))
    own = x.chunk(laid.mesh.data_size)[laid.mesh.data_coordinate]
    laid.backward(laid.module(own).square().sum() * laid.mesh.data_size)
    divided = {name for name in laid.rules.divided if not name.endswith("bias")}
    return _apart(laid.whole_of, expected, module), divided


def _user(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    return USERS[kind]().double(), torch.randn(4, 6, WIDTH, dtype=torch.float64)


def _apart(whole_of: Callable[[str, Tensor], Tensor], expected: nn.Module, module: nn.Module) -> dict[str, float]:
    found = dict(module.named_parameters())
    gradients = {name: x.grad for name, x in expected.named_parameters() if x.grad is not None}
    largest = max(float(x.abs().max()) for x in gradients.values())
    apart = {}
    for name, x in gradients.items():
        gradient = found[name].grad
        assert gradient is not None, name
        apart[name] = float((whole_of(name, gradient) - x).abs().max()) / largest
    return apart
