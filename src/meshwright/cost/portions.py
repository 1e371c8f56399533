"""Portions: which parameters of a block the tensor axis divides, and which every tensor rank holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.blocks import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Mixture,
    Norm,
    QueryKeyNorm,
)
from meshwright.spec.model import Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """Parameters of one block on one tensor rank, before sharding: its part of what is `divided`, and what it holds
    whole, `inside` a region where each rank works on its own features and `outside` of them."""

    divided: float
    inside: float
    outside: float

    @property
    def local(self) -> float:
        return self.divided + self.inside + self.outside


def portions(block: Block, *, tensor: int) -> Portions:
    """The parameters of `block` under `tensor` ranks; a tied head has none of its own but its norm and bias."""
    inside, outside = _whole(block)
    divided = float(block.parameters) - inside - outside
    return Portions(divided=divided / tensor, inside=inside, outside=outside)


def _whole(block: Block) -> tuple[float, float]:
    """Parameters held whole inside regions and outside."""
    if isinstance(block, Embedding):
        return 0.0, float(block.positions * block.width)
    if isinstance(block, Head):
        return 0.0, _norms(block.norm)
    assert isinstance(block, Layer)
    outside = sum(_norms(part.norm, part.post_norm) for part in block.parts)
    return float(sum(_inside(part) for part in block.parts)), outside


def _inside(part: Attention | LatentAttention | FeedForward | Mixture | Recurrence) -> int:
    if isinstance(part, Attention):
        norms = 2 * part.head_dim if part.qk_norm is QueryKeyNorm.HEAD else 0
        return norms + (part.width if part.output_bias else 0)
    if isinstance(part, LatentAttention):
        query = part.query_rank * (part.width + 1) if part.query_rank else 0
        return query + part.width * (part.kv_rank + part.rope_dim) + part.kv_rank
    if isinstance(part, FeedForward):
        return part.width if part.bias else 0
    if isinstance(part, Mixture):
        router = part.width * part.experts + (part.experts if part.router_bias else 0)
        biases = part.experts * part.width if part.expert_bias else 0
        shared = _inside(part.shared) if part.shared else 0
        return router + biases + shared + (part.width if part.shared_gate else 0)
    return 0


def _norms(*norms: Norm | None) -> float:
    return float(sum(norm.parameters for norm in norms if norm))
