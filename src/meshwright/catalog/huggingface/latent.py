"""Decoders with multi-head latent attention: deepseek_v3, kimi_k2, glm_moe_dsa."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.huggingface.dense import decoder_of, feed_forward_of, norm_of
from meshwright.catalog.huggingface.mixture import mixture_of
from meshwright.catalog.huggingface.reader import Reader, yarn_gain
from meshwright.spec.blocks import Indexer, LatentAttention, Layer
from meshwright.spec.model import ModelSpec
from meshwright.spec.routing import Routing, Score, Weighing

BIAS_RATE = 0.001  # DeepSeek-V3, 2412.19437, section 4.2


def deepseek(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Latent attention; the first layers dense, the others with shared experts beside the chosen ones.

    Layers that predict further tokens are not counted. A config with `index_topk` has the indexer of sparse
    attention in every layer.
    """
    count = reader.layers()
    mixer = _attention(reader)
    dense = feed_forward_of(reader)
    experts = mixture_of(reader, hidden="moe_intermediate_size", experts="n_routed_experts", top_k=8)
    experts = replace(experts, routing=_routing(reader))
    shared = reader.integer("n_shared_experts", 1, least=0)
    if shared:
        experts = replace(experts, shared=replace(dense, hidden=shared * experts.hidden, norm=None))
    first, every = reader.integer("first_k_dense_replace", 0, least=0), reader.integer("moe_layer_freq", 1)
    layers = tuple(
        Layer(mixer=mixer, transform=experts if index >= first and index % every == 0 else dense)
        for index in range(count)
    )
    return decoder_of(reader, layers, name=name, source=source)


def _routing(reader: Reader) -> Routing:
    """Sigmoid scores, the best experts of the best groups by score and bias, weighed by their scores (2412.19437).

    The published speed of the bias is not in the config: it is that of the paper.
    """
    normalized = reader.flag("norm_topk_prob", True)
    return Routing(
        score=Score.SIGMOID,
        weighing=Weighing.NORMALIZED if normalized else Weighing.SCORE,
        scale=reader.number("routed_scaling_factor", 2.5),
        groups=reader.integer("n_group", 8),
        chosen_groups=reader.integer("topk_group", 4),
        bias_rate=BIAS_RATE,
    )


def _scale(reader: Reader, *, dims: int) -> float | None:
    """Of scores, where a stretched context sharpens them by YaRN's temperature; None for one over the root of dims."""
    stretch = reader.stretch()
    kind = stretch.values.get("rope_type", stretch.values.get("type"))
    if kind != "yarn" or not stretch.has("mscale_all_dim"):
        return None
    return dims**-0.5 * yarn_gain(stretch.number("factor", 1.0), stretch.number("mscale_all_dim", 1.0)) ** 2


def _attention(reader: Reader) -> LatentAttention:
    width, rope_dim = reader.integer("hidden_size"), reader.integer("qk_rope_head_dim")
    if reader.flag("attention_bias", False):
        reader.note("attention_bias", "latent attention with biases is not supported")
    mixer = LatentAttention(
        width=width,
        heads=reader.integer("num_attention_heads"),
        query_rank=reader.maybe_integer("q_lora_rank"),
        kv_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=reader.integer("v_head_dim"),
        norm=norm_of(reader, width),
        rotary=reader.rotary(rope_dim),
    )
    mixer = replace(mixer, scale=_scale(reader, dims=mixer.nope_dim + mixer.rope_dim))
    if not reader.has("index_topk"):
        return mixer
    if mixer.query_rank is None:
        reader.note("q_lora_rank", "the indexer needs it", why="index_topk is given")
    indexer = Indexer(
        heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        top_k=reader.integer("index_topk"),
    )
    return replace(mixer, indexer=indexer)
