"""Tokens traded for heads by all-to-all, before attention and back after it (DeepSpeed-Ulysses, 2309.14509)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Traders:
    """Ranks of which each holds some tokens of all heads before, and all their tokens of some heads after.

    `order` (tokens,) or (b, tokens) puts the tokens of the ranks one behind the other into ascending positions;
    `back` undoes it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    order: Tensor
    back: Tensor

    def heads_for_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, size * s, heads / size, features) each, from (b, s, heads, features): in one all-to-all."""
        copies = self.size // math.gcd(k.shape[2], self.size)
        k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=2) for x in (k, v))
        parts = [x.unflatten(2, (self.size, -1)) for x in (q, k, v)]
        packed = torch.cat([part.flatten(3) for part in parts], dim=3)
        whole: Tensor = _ToHeads.apply(packed, self)
        found = whole.split([part.shape[3] * part.shape[4] for part in parts], dim=2)
        q, k, v = (x.unflatten(2, part.shape[3:]) for x, part in zip(found, parts, strict=True))
        return q, k, v

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """(b, s, heads, features) from (b, size * s, heads / size, features)."""
        traded: Tensor = _ToTokens.apply(x.flatten(2), self)
        return traded.unflatten(3, x.shape[2:]).flatten(2, 3)

    def to_heads(self, x: Tensor) -> Tensor:
        """(b, size * s, f) of the own heads, in ascending positions, from (b, s, size, f) of every rank's."""
        sent = x.permute(2, 0, 1, 3).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return _placed(received.transpose(0, 1).flatten(1, 2), self.order)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The other way."""
        sent = _placed(x, self.back).unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.permute(1, 2, 0, 3)


def _placed(x: Tensor, order: Tensor) -> Tensor:
    """x (b, tokens, f) with its tokens in `order`."""
    if order.dim() == 1:
        return x.index_select(1, order)
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traders: Traders) -> Tensor:
        ctx.traders = traders
        return traders.to_heads(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.traders.to_tokens(grads[0]), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traders: Traders) -> Tensor:
        ctx.traders = traders
        return traders.to_tokens(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.traders.to_heads(grads[0]), None
