"""Hybrids of gated delta nets and attention: qwen3_next."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.huggingface.dense import FULL, attention_of, decoder_of, feed_forward_of, norm_of
from meshwright.catalog.huggingface.mixture import mixture_of
from meshwright.catalog.huggingface.reader import Reader
from meshwright.spec.blocks import Layer, Mixture, QueryKeyNorm, Recurrence
from meshwright.spec.model import ModelSpec
from meshwright.spec.routing import Routing, Weighing

LINEAR = "linear_attention"


def qwen3_next(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Gated delta nets (2412.06464), and every fourth layer attention with a gate; experts beside a gated shared one.

    Layers that predict further tokens are not counted.
    """
    text = reader.usually(head_dim=256, partial_rotary_factor=0.25)
    count, every = text.layers(), text.integer("full_attention_interval", 4)
    kinds = text.layer_types(
        [FULL if index % every == every - 1 else LINEAR for index in range(count)], known=(LINEAR, FULL)
    )
    full = replace(attention_of(text), qk_norm=QueryKeyNorm.HEAD, gated=True)
    linear, sparse, dense = _delta_net(text), _experts(text), feed_forward_of(text)
    only, step = text.indexes("mlp_only_layers"), text.integer("decoder_sparse_step", 1)
    made = {
        (kind, mixed): Layer(mixer=full if kind == FULL else linear, transform=sparse if mixed else dense)
        for kind in kinds
        for mixed in (True, False)
    }
    layers = tuple(made[kind, index not in only and (index + 1) % step == 0] for index, kind in enumerate(kinds))
    return decoder_of(text, layers, name=name, source=source, positions=32768)


def _delta_net(reader: Reader) -> Recurrence:
    """Heads of values, in groups that share a head of keys and of queries, whose features are those of a state."""
    width, heads = reader.integer("hidden_size"), reader.integer("linear_num_value_heads", 32)
    groups = reader.integer("linear_num_key_heads", 16)
    if heads % groups:
        reader.note("linear_num_key_heads", f"{groups} does not divide {heads} heads of values")
    return Recurrence(
        width=width,
        inner=heads * reader.integer("linear_value_head_dim", 128),
        heads=heads,
        state=reader.integer("linear_key_head_dim", 128),
        groups=groups,
        convolution=reader.integer("linear_conv_kernel_dim", 4),
        norm=norm_of(reader, width),
        delta=True,
    )


def _experts(reader: Reader) -> Mixture:
    experts = mixture_of(reader, hidden="moe_intermediate_size", experts="num_experts", top_k=10)
    shared = replace(feed_forward_of(reader, key="shared_expert_intermediate_size"), norm=None)
    weighing = Weighing.NORMALIZED if reader.flag("norm_topk_prob", True) else Weighing.SCORE
    return replace(experts, shared=shared, shared_gate=True, routing=Routing(weighing=weighing))
