"""Names of gemma4: experts beside a dense branch, a router with a norm and scales of its own, scaled layers."""

from __future__ import annotations

from meshwright.catalog.huggingface.tensors.attention import add_attention
from meshwright.catalog.huggingface.tensors.decoder import Style, add_norm, decoder_table
from meshwright.catalog.huggingface.tensors.feed_forward import ExpertNames, Stored, add_experts, add_feed_forward
from meshwright.catalog.huggingface.tensors.pieces import Pieces, Table
from meshwright.spec.blocks import Attention, FeedForward, Layer, Mixture
from meshwright.spec.model import ModelSpec

_EXPERTS = ExpertNames(stored=Stored.OUTPUTS)


def gemma4_table(model: ModelSpec, *, root: str = "model.", rest: tuple[str, ...] = ()) -> Table:
    """Every parameter under `root`, and the scale of every layer, which is stored beside them."""
    return decoder_table(model, Style(root=root, rest=rest), add_layer=_add_layer)


def _add_layer(pieces: Pieces, layer: Layer, _style: Style) -> None:
    mixer, transform = layer.mixer, layer.transform
    assert isinstance(mixer, Attention), "every layer attends"
    add_attention(pieces.under("mixer.", "self_attn."), mixer)
    add_norm(pieces, "mixer_norm", "input_layernorm", mixer.norm)
    add_norm(pieces, "mixer_post_norm", "post_attention_layernorm", mixer.post_norm)
    if isinstance(transform, Mixture):
        _add_both(pieces, layer, transform)
    elif transform is not None:
        _add_dense(pieces, "transform", transform, after="post_feedforward_layernorm")
    if layer.scaled:
        pieces.add("scale", "layer_scalar", (1,))


def _add_dense(pieces: Pieces, ours: str, part: FeedForward, *, after: str) -> None:
    add_feed_forward(pieces.under(f"{ours}.", "mlp."), part)
    add_norm(pieces, f"{ours}_norm", "pre_feedforward_layernorm", part.norm)
    add_norm(pieces, f"{ours}_post_norm", after, part.post_norm)


def _add_both(pieces: Pieces, layer: Layer, part: Mixture) -> None:
    assert layer.dense is not None, "experts have a dense branch beside them"
    _add_dense(pieces, "dense", layer.dense, after="post_feedforward_layernorm_1")
    router = pieces.under("transform.", "router.")
    router.matrix("router", "proj", (part.experts, part.width))
    router.add("router_norm.weight", "scale", (part.width,))
    router.add("expert_scale", "per_expert_scale", (part.experts,))
    add_experts(pieces.under("transform.experts.", "experts."), part, _EXPERTS)
    add_norm(pieces, "transform.expert_norm", "pre_feedforward_layernorm_2", part.expert_norm)
    add_norm(pieces, "transform_post_norm", "post_feedforward_layernorm_2", part.post_norm)
    add_norm(pieces, "sum_norm", "post_feedforward_layernorm", layer.sum_norm)
