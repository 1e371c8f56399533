"""Names of attention: projections apart (llama) or fused (phi3), norms of queries and keys, sinks, latents."""

from __future__ import annotations

from meshwright.catalog.huggingface.tensors.pieces import Cut, Pieces, Planes
from meshwright.spec.blocks import Attention, LatentAttention, QueryKeyNorm


def add_attention(pieces: Pieces, spec: Attention, *, fused: bool = False, planes: bool = False) -> None:
    """Grouped-query attention; `fused` has queries, keys and values in one matrix, in this order.

    `planes` says that rotary features are stored plane by plane.
    """
    width, queries, keys = spec.width, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rotary = spec.rotary
    order = Planes(size=spec.head_dim, start=0, dims=rotary.dims) if planes and rotary else None
    parts = [("query", "q_proj", queries, order), ("key", "k_proj", keys, order)]
    parts += [] if spec.shared_key_value else [("value", "v_proj", keys, None)]
    start = 0
    for ours, theirs, rows, turned in parts:
        cut = Cut(dim=0, start=start, stop=start + rows) if fused else None
        name = "qkv_proj" if fused else theirs
        pieces.matrix(ours, name, (rows, width), bias=spec.qkv_bias, planes=turned, cut=cut)
        start += rows
    pieces.matrix("output", "o_proj", (width, queries), bias=spec.output_bias)
    if spec.qk_norm in (QueryKeyNorm.HEAD, QueryKeyNorm.FULL):
        whole = spec.qk_norm is QueryKeyNorm.FULL
        pieces.add("query_norm.weight", "q_norm.weight", (queries if whole else spec.head_dim,))
        pieces.add("key_norm.weight", "k_norm.weight", (keys if whole else spec.head_dim,))
    if spec.sinks:
        pieces.add("sinks", "sinks", (spec.heads,))


def add_latent_attention(pieces: Pieces, spec: LatentAttention, *, planes: bool) -> None:
    """Multi-head latent attention as DeepSeek names it; `planes` as above, of the rotary part alone."""
    query_dim = spec.nope_dim + spec.rope_dim
    query_rows = spec.heads * query_dim
    latent_rows = spec.kv_rank + spec.rope_dim
    of_query = Planes(size=query_dim, start=spec.nope_dim, dims=spec.rope_dim) if planes else None
    of_key = Planes(size=latent_rows, start=spec.kv_rank, dims=spec.rope_dim) if planes else None
    if spec.query_rank is None:
        pieces.matrix("query", "q_proj", (query_rows, spec.width), planes=of_query)
    else:
        pieces.matrix("query_down", "q_a_proj", (spec.query_rank, spec.width))
        pieces.add("query_norm.weight", "q_a_layernorm.weight", (spec.query_rank,))
        pieces.matrix("query_up", "q_b_proj", (query_rows, spec.query_rank), planes=of_query)
    pieces.matrix("kv_down", "kv_a_proj_with_mqa", (latent_rows, spec.width), planes=of_key)
    pieces.add("kv_norm.weight", "kv_a_layernorm.weight", (spec.kv_rank,))
    pieces.matrix("kv_up", "kv_b_proj", (spec.heads * (spec.nope_dim + spec.value_dim), spec.kv_rank))
    pieces.matrix("output", "o_proj", (spec.width, spec.heads * spec.value_dim))
