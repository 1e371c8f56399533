"""Small modules with what users write beside layers of torch's own: letters, stacks, gates, gradients by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.foreign_models import HEADS, WIDTH


class Lettered(nn.Module):
    """Attention and its matrices by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.up, self.down = (nn.Parameter(torch.randn(size) / 4) for size in ((WIDTH, 32), (WIDTH, 32)))

    def forward(self, x: Tensor) -> Tensor:
        heads = (WIDTH // HEADS, HEADS)
        query, key, value = (f(x).unflatten(-1, heads[::-1]) for f in (self.query, self.key, self.value))
        weights = torch.einsum("bihd,bjhd->bhij", query, key).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, value).flatten(2)
        x = x + torch.einsum("...i,oi->...o", mixed, self.out)
        return x + torch.einsum("bth,wh->btw", torch.einsum("btw,wh->bth", x, self.up).relu(), self.down)


class Shown(nn.Module):
    """Attention whose weights come out: their average over heads, or those of each head."""

    def __init__(self, *, average: bool) -> None:
        super().__init__()
        self.average = average
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padded[:, -1] = True
        made, weights = self.attention(x, x, x, key_padding_mask=padded, average_attn_weights=self.average)
        weights = weights if self.average else weights[:, 1] - weights[:, 0]
        return x + made + weights @ x


class Gated(nn.Module):
    """A gate by halves, and a stack of matrices, one for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)
        self.up, self.down = (nn.Parameter(torch.randn(size) / 4) for size in ((3, WIDTH, 32), (3, 32, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(functional.glu(self.gate(x)))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.tanh(x @ up) @ down
        return x


class Shared(nn.Module):
    """Keys and values that all heads of queries share, and channels that are convolved each by itself."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.query, self.shared, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * size), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.along, self.slopes = nn.Conv1d(32, 32, 3, padding=1, groups=32), nn.PReLU(32)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.shared(x).chunk(2, dim=-1)
        query = self.query(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        weights = (query @ key[:, None].mT).softmax(-1)
        x = x + self.out((weights @ value[:, None]).transpose(1, 2).flatten(2))
        return x + self.down(self.slopes(self.along(self.up(x).mT)).mT)


class Straight(torch.autograd.Function):
    """x; its gradient has the length one."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm()


straight = Straight.apply


class Backward(nn.Module):
    """Gradients of the length one between two matrices, by a function and by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.four, self.up, self.down = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.two(straight(self.one(x)))
        hidden = self.three(x)
        hidden.register_hook(lambda gradient: gradient / gradient.norm())
        x = x + self.four(hidden)
        hidden = self.up(x)
        hidden.register_hook(lambda gradient: gradient * 3)
        return x + self.down(hidden.relu())


USERS = {
    "lettered": Lettered,
    "shown": lambda: Shown(average=True),
    "shown by heads": lambda: Shown(average=False),
    "gated": Gated,
    "shared": Shared,
    "backward": Backward,
}
# Parameters that two tensor ranks divide.
DIVIDED = {
    "lettered": {"query.weight", "key.weight", "value.weight", "out", "up", "down"},
    "shown": {"attention.in_proj_weight", "attention.out_proj.weight"},
    "shown by heads": {"attention.in_proj_weight", "attention.out_proj.weight"},
    "shared": {"query.weight", "out.weight", "up.weight", "down.weight"},
    "gated": {"gate.weight", "out.weight", "up", "down"},
    "backward": {"up.weight", "down.weight"},
}
