"""Causal attention: grouped-query projections around a core that holds no matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.context import Context
from meshwright.nn.linear import Linear
from meshwright.nn.norm import RootMeanSquareNorm
from meshwright.nn.rotary import rotate
from meshwright.nn.weights import Weighted
from meshwright.spec.model import Attention, LatentAttention, QueryKeyNorm

# On processors the half-precision kernels gain nothing on sequences up to this long, and backward takes up to six
# times as long on the shortest (torch 2.13, docs/lab.md): those are attended in fp32.
WIDE_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What turns products of queries and keys into scores, and which keys are seen; see Attention."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    prefix: bool = False


class KeyExchange(Protocol):
    """Attention of this rank's queries to the keys of every rank that holds a part of their sequences."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, core: int, scoring: Scoring, context: Context
    ) -> Tensor:
        """Shapes of AttentionCore.forward; `core` says which one to the memory of the context. Collective over those
        ranks."""


class AttentionCore(nn.Module):
    """softmax(q k^T) v under the mask of the context; the part that selective recompute runs again.

    `exchange`, when set, does it instead: a layout that divides sequences over ranks puts it there.
    """

    def __init__(self, spec: Attention | LatentAttention, *, head_dim: int) -> None:
        super().__init__()
        self.window, self.chunk = spec.window, getattr(spec, "chunk", None)
        self.prefix = spec.prefix > 0.0
        self.softcap: float | None = getattr(spec, "softcap", None)
        self.scale = getattr(spec, "scale", None) or 1.0 / math.sqrt(head_dim)
        self.exchange: KeyExchange | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> Tensor:
        """(b, s, heads, value_dim) from q (b, s, heads, d), k (b, s, kv_heads, d), v (b, s, kv_heads, value_dim)."""
        if self.exchange is not None:
            scoring = Scoring(
                scale=self.scale, softcap=self.softcap, window=self.window, chunk=self.chunk, prefix=self.prefix
            )
            return self.exchange(q, k, v, sinks, core=id(self), scoring=scoring, context=context)
        written_out = sinks is not None or self.softcap is not None
        lengths = None if written_out else context.lengths(window=self.window, chunk=self.chunk)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if lengths is not None:
            prefixes = context.prefixes() if self.prefix and context.ahead is not None else None
            return self._by_document(q, k, v, lengths, prefixes).transpose(1, 2)
        mask = context.mask(q.shape[2], window=self.window, chunk=self.chunk, prefix=self.prefix, device=q.device)
        if context.memory is not None:
            k, v = context.memory.extend(id(self), k, v)
        if written_out:
            return self._explicit(q, k, v, sinks, mask).transpose(1, 2)
        return self._attend(q, k, v, mask).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = True) -> Tensor:
        causal, grouped = causal and mask is None and q.shape[2] > 1, q.shape[1] != k.shape[1]
        if grouped and mask is not None and q.device.type != "cpu":
            # Of torch's fused kernels only cuDNN's, which few devices prefer, takes a mask and fewer keys than queries
            # (2.11 to 2.13): without one all scores would be written out.
            k, v, grouped = *(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)), False
        given = q.dtype
        if q.device.type == "cpu" and q.itemsize < 4 and k.shape[2] <= WIDE_LENGTH:
            q, k, v = q.float(), k.float(), v.float()
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
        ).to(given)

    def _by_document(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[tuple[int, ...], ...],
        prefixes: tuple[tuple[int, ...], ...] | None,
    ) -> Tensor:
        """Attention inside each document: no score between documents is ever formed. Causal, but for `prefixes`."""
        if prefixes is None and all(len(row) == 1 for row in lengths):
            return self._attend(q, k, v, None)
        rows = []
        for index, (sizes, *row) in enumerate(zip(lengths, q.split(1), k.split(1), v.split(1), strict=True)):
            first = [1] * len(sizes) if prefixes is None else prefixes[index]
            parts = zip(*(x.split(sizes, dim=2) for x in row), first, strict=True)
            rows.append(torch.cat([self._in_document(*part) for part in parts], dim=2))
        return torch.cat(rows)

    def _in_document(self, q: Tensor, k: Tensor, v: Tensor, prefix: int) -> Tensor:
        """One document, whose first `prefix` tokens see each other."""
        if prefix == 1:
            return self._attend(q, k, v, None)
        first = self._attend(q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix], None, causal=False)
        rest = q[:, :, prefix:]
        if not rest.shape[2]:
            return first
        mask = torch.ones(rest.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(prefix)
        return torch.cat((first, self._attend(rest, k, v, mask)), dim=2)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None) -> Tensor:
        """The scores written out: for a soft cap (2408.00118) and for sinks, a score per head that takes no value."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~mask, float("-inf")).to(torch.promote_types(scores.dtype, torch.float32))
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[2]]
        return weights.to(v.dtype) @ v


class GroupedAttention(Weighted):
    """Multi-head attention whose keys and values may serve several queries each (2305.13245).

    The number of heads is read from the projections' outputs, so a module that holds some of the heads is this one.
    """

    def __init__(self, spec: Attention) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.query = Linear(spec.width, queries, bias=spec.qkv_bias)
        self.key = Linear(spec.width, keys, bias=spec.qkv_bias)
        self.value = None if spec.shared_key_value else Linear(spec.width, keys, bias=spec.qkv_bias)
        self.query_norm = self._norm(queries)
        self.key_norm = self._norm(keys)
        self.value_norm = RootMeanSquareNorm(spec.head_dim, eps=self._eps, scaled=False) if spec.value_norm else None
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        self.core = AttentionCore(spec, head_dim=spec.head_dim)
        self.output = Linear(queries, spec.width, bias=spec.output_bias)

    def _norm(self, features: int) -> RootMeanSquareNorm | None:
        if self.spec.qk_norm is QueryKeyNorm.FULL:
            return RootMeanSquareNorm(features, eps=self._eps)
        if self.spec.qk_norm is QueryKeyNorm.NONE:
            return None
        return RootMeanSquareNorm(self.spec.head_dim, eps=self._eps, scaled=self.spec.qk_norm is QueryKeyNorm.HEAD)

    @property
    def _eps(self) -> float:
        beside = self.spec.norm or self.spec.post_norm
        return beside.eps if beside else 1e-6

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, s, width) from normed (b, s, width)."""
        projected = self.project(x, [part for part in (self.query, self.key, self.value) if part is not None])
        q = self._heads(next(projected), self.query_norm)
        raw = next(projected)
        k = self._heads(raw, self.key_norm)
        v = (raw if self.value is None else next(projected)).unflatten(-1, (-1, self.spec.head_dim))
        v = v if self.value_norm is None else self.value_norm(v)
        if self.spec.rotary is not None:
            turn = context.angles(self.spec.rotary, q)
            q, k = rotate(q, turn), rotate(k, turn)
        if self.spec.temperature is not None:
            q = (q * context.temperatures(self.spec.temperature, q)).to(q.dtype)
        sinks = None if self.sinks is None else self.read(self.sinks)
        return self.output(self.core(q, k, v, sinks, context).flatten(-2))

    def _heads(self, x: Tensor, norm: RootMeanSquareNorm | None) -> Tensor:
        if norm is not None and self.spec.qk_norm is QueryKeyNorm.FULL:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.spec.head_dim))
        return norm(x) if norm is not None and self.spec.qk_norm is not QueryKeyNorm.FULL else x
