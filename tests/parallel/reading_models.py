"""A small module whose forward reads its blocks in the ways that users write beside a plain call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Any) -> Any:
        return self.mixed(x)


class Keeping(Block):
    """What it gives is read off it."""

    def forward(self, x: Tensor) -> Tensor:
        self.result = self.mixed(x)
        return x


class Ending(Block):
    """What its last matrix gives is what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return made


class Wrapping(Block):
    """It takes and gives an object that torch does not look into."""

    def forward(self, x: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(x=self.mixed(x.x))


class Reading(nn.Module):
    """Two blocks between a table and a head, read as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        made = {"kept": Keeping, "wrapped": Wrapping, "last": Ending}.get(kind, Block)
        self.blocks = nn.ModuleList([made(), made()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = getattr(self, self.kind)(self.table(tokens), *self.blocks)
        return x @ self.table.weight.t() if self.kind == "turned" else self.head(x)

    def method(self, x: Tensor, first: Block, second: Block) -> Tensor:
        return second.forward(first.mixed(x))

    def inner(self, x: Tensor, first: Block, second: Block) -> Tensor:
        return x + second.down(functional.gelu(second.up(first(x))))

    def weights(self, x: Tensor, first: Block, second: Block) -> Tensor:
        return second(functional.linear(functional.linear(x, first.up.weight), first.down.weight))

    def lent(self, x: Tensor, first: Block, second: Block) -> Tensor:
        return functional_call(second, dict(first.named_parameters()), (x,))

    def kept(self, x: Tensor, first: Keeping, second: Keeping) -> Tensor:
        first(x)
        second(first.result)
        return second.result

    def wrapped(self, x: Tensor, first: Block, second: Block) -> Tensor:
        return second(first(SimpleNamespace(x=x))).x

    def checkpointed(self, x: Tensor, first: Block, second: Block) -> Tensor:
        for block in (first, second):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def last(self, x: Tensor, first: Block, second: Block) -> Tensor:
        x = x + first(x)
        return x + second(x)

    def turned(self, x: Tensor, first: Block, second: Block) -> Tensor:
        return second(first(x))


def reading(kind: str) -> tuple[Reading, Tensor]:
    """The module in float64, and four sequences with their targets."""
    torch.manual_seed(5)
    module = Reading(kind).double()
    return module, torch.randint(0, VOCAB, (4, 9))
