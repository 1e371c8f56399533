"""Decoders whose layers choose among experts: mixtral, qwen3_moe, gpt_oss, llama4."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.huggingface.dense import (
    FULL,
    SLIDING,
    attention_of,
    decoder_of,
    feed_forward_of,
    norm_of,
    qwen_mixer,
)
from meshwright.catalog.huggingface.reader import Reader
from meshwright.catalog.huggingface.towers import llama4_vision
from meshwright.spec.blocks import Activation, Layer, Mixture, QueryKeyNorm
from meshwright.spec.model import ModelSpec
from meshwright.spec.positions import Temperature
from meshwright.spec.routing import Routing, Score, Weighing

CHUNKED = "chunked_attention"


def mixture_of(reader: Reader, *, hidden: str, experts: str, top_k: int = 2) -> Mixture:
    """Gated experts of width `hidden` behind a norm; more experts chosen than there are is noted.

    Newer configs of every family may call the number of experts num_local_experts.
    """
    known = experts if reader.has(experts) or not reader.has("num_local_experts") else "num_local_experts"
    width, count = reader.integer("hidden_size"), reader.integer(known)
    chosen = reader.integer("num_experts_per_tok", top_k)
    if chosen > count:
        reader.note("num_experts_per_tok", f"{chosen} is more than the {count} experts")
    return Mixture(
        width=width,
        hidden=reader.integer(hidden),
        experts=count,
        top_k=min(chosen, count),
        norm=norm_of(reader, width),
        activation=reader.activation("hidden_activation", "hidden_act"),
    )


def mixtral(reader: Reader, *, name: str, source: str) -> ModelSpec:
    mixer = replace(attention_of(reader), window=reader.maybe_integer("sliding_window"))
    layer = Layer(mixer=mixer, transform=mixture_of(reader, hidden="intermediate_size", experts="num_local_experts"))
    return decoder_of(reader, (layer,) * reader.layers(), name=name, source=source)


def qwen3_moe(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Every `decoder_sparse_step`-th layer has experts, but those in `mlp_only_layers`."""
    mixer, sparse = qwen_mixer(reader), mixture_of(reader, hidden="moe_intermediate_size", experts="num_experts")
    dense = feed_forward_of(reader)
    only, step = reader.indexes("mlp_only_layers"), reader.integer("decoder_sparse_step", 1)
    layers = tuple(
        Layer(mixer=mixer(index), transform=sparse if index not in only and (index + 1) % step == 0 else dense)
        for index in range(reader.layers())
    )
    return decoder_of(reader, layers, name=name, source=source)


def gpt_oss(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Attention sinks, a window in every other layer, biases on experts and router."""
    bias = reader.flag("attention_bias", True)
    full = replace(attention_of(reader), sinks=True, qkv_bias=bias, output_bias=bias)
    sliding = replace(full, window=reader.integer("sliding_window", 128))
    count = reader.layers()
    kinds = reader.layer_types([SLIDING if index % 2 == 0 else FULL for index in range(count)], known=(SLIDING, FULL))
    experts = mixture_of(reader, hidden="intermediate_size", experts="num_local_experts", top_k=4)
    transform = replace(experts, expert_bias=True, router_bias=True, activation=Activation.CLAMPED_SWIGLU)
    layers = tuple(Layer(mixer=sliding if kind == SLIDING else full, transform=transform) for kind in kinds)
    return decoder_of(reader, layers, name=name, source=source)


def llama4(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Chunked attention with rotary positions but in every fourth layer, whose queries grow with their position; one
    shared expert beside the chosen ones, whose inputs are weighed by the sigmoid of their scores.

    The vision tower is counted when the config has a `vision_config`.
    """
    text = reader.table("text_config") if reader.has("text_config") else reader
    count = text.layers()
    interval = text.integer("no_rope_layer_interval", 4)
    rotary = text.items("no_rope_layers", length=count) or [int((i + 1) % interval != 0) for i in range(count)]
    kinds = text.layer_types([CHUNKED if uses else FULL for uses in rotary], known=(CHUNKED, FULL))
    step = text.integer("interleave_moe_layer_step", 1)
    sparse = text.indexes("moe_layers") or tuple(range(step - 1, count, step))
    attention, experts, dense = attention_of(text), _shared(text), feed_forward_of(text, key="intermediate_size_mlp")
    unscaled = QueryKeyNorm.UNSCALED if text.flag("use_qk_norm", True) else QueryKeyNorm.NONE
    chunk = text.integer("attention_chunk_size", 8192)
    grows = text.flag("attn_temperature_tuning", True)
    positions, gain = text.integer("floor_scale", 8192), text.number("attn_scale", 0.1)
    temperature = Temperature(positions=positions, gain=gain) if grows else None
    layers = []
    for index, (uses, kind) in enumerate(zip(rotary, kinds, strict=True)):
        mixer = replace(attention, chunk=chunk if kind == CHUNKED else None)
        without = replace(mixer, rotary=None, temperature=temperature)
        mixer = replace(mixer, qk_norm=unscaled) if uses else without
        layers.append(Layer(mixer=mixer, transform=experts if index in sparse else dense))
    model = decoder_of(text, tuple(layers), name=name, source=source)
    if text is reader or not reader.has("vision_config"):
        return model
    return replace(model, towers=(llama4_vision(reader.table("vision_config"), width=model.width),))


def _shared(reader: Reader) -> Mixture:
    experts = mixture_of(reader, hidden="intermediate_size", experts="num_local_experts", top_k=1)
    routing = Routing(score=Score.SIGMOID, weighing=Weighing.SCORE, weigh_inputs=True)
    return replace(experts, routing=routing, shared=replace(feed_forward_of(reader), norm=None))
