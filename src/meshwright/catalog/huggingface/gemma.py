"""gemma4: windowed and global attention of different heads, experts beside a dense branch, a vision tower."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.catalog.huggingface.dense import FULL, SLIDING, attention_of, decoder_of, feed_forward_of, norm_of
from meshwright.catalog.huggingface.mixture import mixture_of
from meshwright.catalog.huggingface.reader import Reader
from meshwright.catalog.huggingface.towers import gemma4_vision
from meshwright.spec.blocks import Attention, Layer, Mixture, QueryKeyNorm, Transform
from meshwright.spec.model import ModelSpec


def gemma4(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Five windowed layers to one global; a global layer may use its keys as values.

    The vision tower is counted when the config has a `vision_config`; an audio tower and embeddings per layer are
    refused.
    """
    text = reader.table("text_config") if reader.has("text_config") else reader
    width, count = text.integer("hidden_size"), text.layers()
    if reader.has("audio_config"):
        reader.note("audio_config", "audio towers are not supported")
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if text.integer(key, 0, least=0):
            text.note(key, f"{key} above 0 is not supported")
    kinds = text.layer_types(
        [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(count)], known=(SLIDING, FULL)
    )
    sliding, full, transform = _sliding(text), _global(text), _transform(text)
    layers = tuple(Layer(mixer=sliding if kind == SLIDING else full, transform=transform) for kind in kinds)
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
        scale=1.0,
    )


def _global(reader: Reader) -> Attention:
    base, shared = _sliding(reader), reader.flag("attention_k_eq_v", False)
    head_dim = reader.integer("global_head_dim", base.head_dim)
    return replace(
        base,
        window=None,
        head_dim=head_dim,
        kv_heads=reader.integer("num_global_key_value_heads", base.kv_heads) if shared else base.kv_heads,
        rotary=reader.rotary(head_dim, kind=FULL),
        shared_key_value=shared,
    )


def _transform(reader: Reader) -> Transform:
    """A dense feed-forward; with `enable_moe_block` also experts beside it, and their sum normed once more.

    Beside its matrix the router scales its inputs and each expert's output, and the experts' sum has a norm.
    """
    norm = norm_of(reader, reader.integer("hidden_size"))
    dense = replace(feed_forward_of(reader), post_norm=norm)
    if not reader.flag("enable_moe_block", False):
        return dense
    experts: Mixture = mixture_of(
        reader, hidden="moe_intermediate_size", experts="num_experts", top_k=reader.integer("top_k_experts")
    )
    return replace(
        experts, post_norm=norm, shared=dense, extra_parameters=experts.experts + experts.width + norm.parameters
    )
