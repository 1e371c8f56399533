"""gemma4: windowed and global attention of different heads, experts beside a dense branch, a vision tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from meshwright.catalog.huggingface.dense import FULL, SLIDING, attention_of, decoder_of, feed_forward_of, norm_of
from meshwright.catalog.huggingface.mixture import mixture_of
from meshwright.catalog.huggingface.reader import Reader
from meshwright.catalog.huggingface.towers import gemma4_vision
from meshwright.spec.blocks import Activation, Attention, FeedForward, Layer, Mixture, QueryKeyNorm, Transform
from meshwright.spec.model import ModelSpec

Part = TypeVar("Part", FeedForward, Mixture)


def gemma4(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Five windowed layers to one global, which may use its keys as values. Values are normed, and what a layer gives
    is scaled.

    The vision tower is counted when the config has a `vision_config`; an audio tower, embeddings per layer and keys
    that layers share are refused.
    """
    text = reader.table("text_config") if reader.has("text_config") else reader
    width, count = text.integer("hidden_size"), text.layers()
    if reader.has("audio_config"):
        reader.note("audio_config", "audio towers are not supported")
    for key, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if text.integer(key, default, least=0):
            text.note(key, f"{key} above 0 is not supported")
    kinds = text.layer_types(
        [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(count)], known=(SLIDING, FULL)
    )
    kinds = (*kinds[:-1], FULL)
    transform, dense = _transforms(text)
    norm = norm_of(text, width) if dense else None
    sliding, full = (
        Layer(mixer=mixer, transform=transform, dense=dense, sum_norm=norm, scaled=True)
        for mixer in (_sliding(text), _global(text, kinds))
    )
    layers = tuple(sliding if kind == SLIDING else full for kind in kinds)
    model = decoder_of(text, layers, name=name, source=source, tied=True, embedding_scale=math.sqrt(width))
    if text is reader or not reader.has("vision_config"):
        return model
    return replace(model, towers=(gemma4_vision(reader.table("vision_config"), width=width),))


def _sliding(reader: Reader) -> Attention:
    base = attention_of(reader)
    return replace(
        base,
        post_norm=base.norm,
        window=reader.integer("sliding_window", 512),
        rotary=reader.rotary(base.head_dim, kind=SLIDING),
        qk_norm=QueryKeyNorm.HEAD,
        value_norm=True,
        scale=1.0,
    )


def _global(reader: Reader, kinds: Sequence[str]) -> Attention:
    """Heads of a width and number of their own, which newer configs tell layer by layer."""
    base, shared = _sliding(reader), reader.flag("attention_k_eq_v", False)
    apart = _per_layer(reader, kinds)
    head_dim = apart.integer("head_dim", base.head_dim) if apart else reader.integer("global_head_dim", 512)
    told = apart or reader
    kv_heads = told.integer("num_key_value_heads" if apart else "num_global_key_value_heads", base.kv_heads)
    return replace(
        base,
        window=None,
        head_dim=head_dim,
        kv_heads=kv_heads if apart or shared else base.kv_heads,
        rotary=reader.rotary(head_dim, kind=FULL),
        shared_key_value=shared,
    )


def _per_layer(reader: Reader, kinds: Sequence[str]) -> Reader | None:
    """What `per_layer_config` says of every global layer; None where there is none. Anything else in it is noted."""
    if not reader.has("per_layer_config"):
        return None
    told = reader.table("per_layer_config")
    each = [told.table(str(index)) for index, kind in enumerate(kinds) if kind == FULL]
    odd = {str(index) for index, kind in enumerate(kinds) if kind == FULL} ^ set(told.values)
    unlike = any(entry.values != each[0].values for entry in each)
    if odd or unlike or set(each[0].values) - {"head_dim", "num_key_value_heads"}:
        reader.note(
            "per_layer_config", "only global layers that are alike, in head_dim and num_key_value_heads, are read"
        )
    return each[0]


def _transforms(reader: Reader) -> tuple[Transform, FeedForward | None]:
    """A dense feed-forward; with `enable_moe_block` experts that have it beside them."""
    norm = norm_of(reader, reader.integer("hidden_size"))
    dense = replace(_gelu(reader, feed_forward_of(reader)), post_norm=norm)
    if not reader.flag("enable_moe_block", False):
        return dense, None
    experts = mixture_of(
        reader, hidden="moe_intermediate_size", experts="num_experts", top_k=reader.integer("top_k_experts")
    )
    routed = replace(
        _gelu(reader, experts),
        norm=None,
        post_norm=norm,
        router_norm=norm,
        router_scale=norm.width**-0.5,
        expert_norm=norm,
        expert_scale=True,
    )
    return routed, dense


def _gelu(reader: Reader, part: Part) -> Part:
    """With the activation of the family where the config says none."""
    return part if reader.has("hidden_activation") else replace(part, activation=Activation.GELU_TANH)
