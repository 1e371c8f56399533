"""Decoders with one feed-forward a layer: llama, mistral, qwen2, qwen3, olmo2, olmo3, gemma2, phi3, gpt2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from meshwright.catalog.huggingface.reader import Reader
from meshwright.spec.blocks import (
    Activation,
    Attention,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Norm,
    NormKind,
    QueryKeyNorm,
    Transform,
)
from meshwright.spec.model import ModelSpec

SLIDING, FULL = "sliding_attention", "full_attention"


def norm_of(reader: Reader, width: int) -> Norm:
    return Norm(width=width, eps=reader.number("rms_norm_eps", reader.number("layer_norm_epsilon", 1e-6)))


def attention_of(reader: Reader) -> Attention:
    """Grouped-query attention as llama has it: a norm before, rotary positions, biases by `attention_bias`."""
    heads = reader.heads()
    bias = reader.flag("attention_bias", False)
    return Attention(
        width=heads.width,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        norm=norm_of(reader, heads.width),
        rotary=reader.rotary(heads.head_dim),
        qkv_bias=bias,
        output_bias=bias,
    )


def feed_forward_of(reader: Reader, *, key: str = "intermediate_size") -> FeedForward:
    """Gated feed-forward of a norm, three matrices and biases by `mlp_bias`."""
    width = reader.integer("hidden_size")
    return FeedForward(
        width=width,
        hidden=reader.integer(key),
        norm=norm_of(reader, width),
        activation=reader.activation("hidden_activation", "hidden_act"),
        bias=reader.flag("mlp_bias", False),
    )


def decoder_of(
    reader: Reader,
    layers: tuple[Layer, ...],
    *,
    name: str,
    source: str,
    tied: bool = False,
    embedding_scale: float = 1.0,
    positions: int = 2048,
) -> ModelSpec:
    """The model around `layers`; `tied`, the embedding's scale and `positions` as the family has them by default."""
    width, vocab = reader.integer("hidden_size"), reader.integer("vocab_size")
    return ModelSpec(
        name=name,
        embedding=Embedding(vocab=vocab, width=width, scale=embedding_scale),
        layers=layers,
        head=Head(
            vocab=vocab,
            width=width,
            norm=norm_of(reader, width),
            tied=reader.flag("tie_word_embeddings", tied),
            softcap=reader.maybe_number("final_logit_softcapping"),
        ),
        max_positions=reader.integer("max_position_embeddings", positions),
        initializer_range=reader.number("initializer_range", 0.02),
        source=source,
    )


def llama(reader: Reader, *, name: str, source: str) -> ModelSpec:
    layer = Layer(mixer=attention_of(reader), transform=feed_forward_of(reader))
    return decoder_of(reader, (layer,) * reader.layers(), name=name, source=source)


def mistral(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """As llama, with a sliding window in every layer where one is given; phi3 is the same with fused matrices."""
    mixer = replace(attention_of(reader), window=reader.maybe_integer("sliding_window"))
    layer = Layer(mixer=mixer, transform=feed_forward_of(reader))
    return decoder_of(reader, (layer,) * reader.layers(), name=name, source=source)


def qwen_mixer(reader: Reader) -> Callable[[int], Attention]:
    """The attention of layer i of a Qwen3 model: norms on queries and keys, a window only where it is asked for."""
    full = replace(attention_of(reader), qk_norm=QueryKeyNorm.HEAD)
    return _windowed_from(reader, full)


def qwen3(reader: Reader, *, name: str, source: str) -> ModelSpec:
    return _alternating(reader, qwen_mixer(reader), feed_forward_of(reader), name=name, source=source)


def qwen2(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """As qwen3 with biases on queries, keys and values in place of their norms."""
    mixer = _windowed_from(reader, replace(attention_of(reader), qkv_bias=True, output_bias=False))
    return _alternating(reader, mixer, feed_forward_of(reader), name=name, source=source)


def olmo2(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Norms after each part and none before it; queries and keys are normed over all heads at once."""
    mixer, transform = _post_normed(reader)
    return decoder_of(reader, (Layer(mixer=mixer, transform=transform),) * reader.layers(), name=name, source=source)


def olmo3(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """As olmo2, three of four layers with a sliding window; only the others stretch their rotary frequencies."""
    full, transform = _post_normed(reader)
    count = reader.layers()
    kinds = reader.layer_types(
        [FULL if (index + 1) % 4 == 0 else SLIDING for index in range(count)], known=(SLIDING, FULL)
    )
    full = replace(full, rotary=reader.rotary(full.head_dim, kind=FULL))
    near = reader.rotary(full.head_dim, kind=SLIDING)
    rotary = near if reader.has_by_layer("rope_parameters", kind=SLIDING) else replace(near, scaling=None)
    sliding = replace(full, window=reader.integer("sliding_window", 4096), rotary=rotary)
    layers = tuple(Layer(mixer=sliding if kind == SLIDING else full, transform=transform) for kind in kinds)
    return decoder_of(reader, layers, name=name, source=source)


def gemma2(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Norms before and after each part, capped scores, a window in every other layer, a scaled embedding."""
    width = reader.integer("hidden_size")
    norm = norm_of(reader, width)
    full = replace(
        attention_of(reader),
        post_norm=norm,
        softcap=reader.maybe_number("attn_logit_softcapping"),
        scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )
    count = reader.layers()
    kinds = reader.layer_types([SLIDING if index % 2 == 0 else FULL for index in range(count)], known=(SLIDING, FULL))
    sliding = replace(full, window=reader.integer("sliding_window", 4096))
    transform = replace(feed_forward_of(reader), post_norm=norm)
    layers = tuple(Layer(mixer=sliding if kind == SLIDING else full, transform=transform) for kind in kinds)
    return decoder_of(reader, layers, name=name, source=source, tied=True, embedding_scale=math.sqrt(width))


def gpt2(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Layer norms, learned positions, biases everywhere, a tied head."""
    width, heads, vocab = reader.integer("n_embd"), reader.integer("n_head"), reader.integer("vocab_size")
    positions = reader.integer("n_positions", 1024)
    if width % heads:
        reader.note("n_head", f"{heads} does not divide n_embd {width}")
    norm = Norm(width=width, kind=NormKind.LAYER, eps=reader.number("layer_norm_epsilon", 1e-5))
    mixer = Attention(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=max(width // heads, 1),
        norm=norm,
        qkv_bias=True,
        output_bias=True,
    )
    activation = reader.activation("activation_function") if reader.has("activation_function") else Activation.GELU_TANH
    hidden = reader.integer("n_inner", 4 * width)
    transform = FeedForward(width=width, hidden=hidden, norm=norm, gated=False, activation=activation, bias=True)
    return ModelSpec(
        name=name,
        embedding=Embedding(vocab=vocab, width=width, positions=positions),
        layers=(Layer(mixer=mixer, transform=transform),) * reader.layers("n_layer"),
        head=Head(vocab=vocab, width=width, norm=norm, tied=reader.flag("tie_word_embeddings", True)),
        max_positions=positions,
        initializer_range=reader.number("initializer_range", 0.02),
        source=source,
    )


def _post_normed(reader: Reader) -> tuple[Attention, FeedForward]:
    norm = norm_of(reader, reader.integer("hidden_size"))
    mixer = replace(attention_of(reader), norm=None, post_norm=norm, qk_norm=QueryKeyNorm.FULL)
    return mixer, replace(feed_forward_of(reader), norm=None, post_norm=norm)


def _windowed_from(reader: Reader, full: Attention) -> Callable[[int], Attention]:
    """Layers from `max_window_layers` on, or those that `layer_types` names, have the window when it is used."""
    count = reader.layers()
    used = reader.flag("use_sliding_window", False) and reader.has("sliding_window")
    first = reader.integer("max_window_layers", count, least=0)
    kinds = reader.layer_types(
        [SLIDING if used and index >= first else FULL for index in range(count)], known=(SLIDING, FULL)
    )
    sliding = replace(full, window=reader.integer("sliding_window", 4096))
    return lambda index: sliding if used and kinds[index] == SLIDING else full


def _alternating(
    reader: Reader, mixer: Callable[[int], Attention], transform: Transform, *, name: str, source: str
) -> ModelSpec:
    layers = tuple(Layer(mixer=mixer(index), transform=transform) for index in range(reader.layers()))
    return decoder_of(reader, layers, name=name, source=source)
