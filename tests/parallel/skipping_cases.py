"""Modules of which each data rank runs other parts, on one device and over data ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.foreign import parallelize
from meshwright.spec.degrees import plan_of_degrees
from meshwright.spec.errors import ConfigError

WIDTH, ROWS, EXPERTS = 4, 8, 5
# Experts that rows choose: the last one is nobody's. Each data rank has half of the rows.
CHOSEN = torch.tensor([0, 0, 2, 2, 1, 1, 3, 3])
Gradients = dict[str, Any]


def expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


class Mixture(nn.Module):
    """Experts of which those without rows are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for place, one in enumerate(self.experts):
            rows = (chosen == place).nonzero().squeeze(-1)
            if len(rows):
                x = x.index_add(0, rows, one(x[rows]))
        return x


class Stack(nn.Module):
    """Two mixtures one after the other, which are blocks; their experts lie inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Mixture(), Mixture()])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, chosen)
        return x


class Dropping(nn.Module):
    """Layers of which those in `run` are called, and what `unread` ones give is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([expert() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, run: tuple[int, ...], unread: tuple[int, ...] = ()) -> Tensor:
        for place in run:
            added = self.layers[place](x)
            x = x if place in unread else x + added
        return self.head(x)


def _rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def mixed_on_one_device() -> Gradients:
    """Gradients of every parameter; None where none came."""
    module = _made(Stack)
    module(_rows(), CHOSEN).square().mean().backward()
    return {name: None if x.grad is None else x.grad.numpy() for name, x in module.named_parameters()}


def mixed_on_one_rank(degrees: dict[str, Any]) -> Gradients:
    """The same over two data ranks, in two microbatches: an expert that one has rows of is without any in the other."""
    laid = parallelize(_made(Stack), plan_of_degrees(precision="fp64", microbatches=2, **degrees))
    start = 4 * laid.mesh.data_coordinate
    for rows in (slice(start, start + 2), slice(start + 2, start + 4)):
        loss = laid.module(_rows()[rows], CHOSEN[rows]).square().mean() / 2
        laid.backward(loss, last=rows.stop == start + 4)
    named = dict(laid.module.named_parameters())
    return {name: None if x.grad is None else laid.whole_of(name, x.grad).numpy() for name, x in named.items()}


def dropped_on_one_device(run: tuple[int, ...]) -> Gradients:
    module = _made(Dropping)
    module(_rows(), run).square().mean().backward()
    return {name: None if x.grad is None else x.grad.numpy() for name, x in module.named_parameters()}


def dropped_on_one_rank(sharding: str, run: tuple[int, ...]) -> Gradients:
    """Over two ranks that call the same layers."""
    laid = parallelize(_made(Dropping), plan_of_degrees(precision="fp64", shard=2, sharding=sharding))
    laid.backward(laid.module(_rows().chunk(2)[dist.get_rank()], run).square().mean())
    named = dict(laid.module.named_parameters())
    return {name: None if x.grad is None else laid.whole_of(name, x.grad).numpy() for name, x in named.items()}


def told(sharding: str, runs: tuple[tuple[int, ...], ...], unread: tuple[tuple[int, ...], ...] = ((), ())) -> str:
    """What each of two ranks is told that call layers and read their results each in its own way."""
    laid = parallelize(_made(Dropping), plan_of_degrees(precision="fp64", shard=2, sharding=sharding))
    rank = dist.get_rank()
    try:
        laid.backward(laid.module(_rows().chunk(2)[rank], runs[rank], unread[rank]).square().mean())
    except ConfigError as error:
        return str(error)
    return ""
