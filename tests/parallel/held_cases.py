"""A module one of whose parameters is read by a reference that registers nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.foreign import parallelize
from meshwright.spec.degrees import plan_of_degrees
from meshwright.spec.errors import ConfigError


class Tied(nn.Module):
    """Its matrix is used twice, once as an entry of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 4, bias=False)
        self.tied = (self.one.weight,)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).tanh() @ self.tied[0].t()


def rows() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tied_apart() -> float:
    """How far the gradient of two replicas is from that of one device."""
    expected, module = Tied().double(), Tied().double()
    expected(rows()).square().mean().backward()
    laid = parallelize(module, plan_of_degrees(precision="fp64", replicate=2))
    laid.backward(laid.module(rows().chunk(2)[dist.get_rank()]).square().mean())
    assert expected.one.weight.grad is not None
    assert module.one.weight.grad is not None
    return float((module.one.weight.grad - expected.one.weight.grad).abs().max())


def tied_told() -> str:
    """What is said where blocks are sharded, which makes other parameters."""
    laid = parallelize(Tied().double(), plan_of_degrees(precision="fp64", shard=2))
    try:
        laid.module(rows())
    except ConfigError as error:
        return str(error)
    return ""


def held_before(degrees: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """The shape of a parameter that somebody had from before, and what is said of its gradient."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    held = list(module.parameters())
    parallelize(module, plan_of_degrees(precision="fp64", **degrees), example=(rows(),))
    try:
        gradient = held[0].grad
    except ConfigError as error:
        return tuple(held[0].shape), str(error)
    return tuple(held[0].shape), f"{gradient}"
