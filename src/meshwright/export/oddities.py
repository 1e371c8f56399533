"""Oddities: what of a model no flags made from its Sizes would build."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export.meaning import Sizes, sizes
from meshwright.spec.model import Attention, FeedForward, LatentAttention, Layer, Mixture, ModelSpec, Norm, QueryKeyNorm
from meshwright.spec.positions import Rotary

_OF_ATTENTION = {
    "window": "attention windows",
    "chunk": "chunked attention",
    "sinks": "attention sinks",
    "softcap": "soft caps",
    "scale": "its own scale of scores",
    "shared_key_value": "keys used as values",
    "value_norm": "norms of values",
    "gated": "gates on what attention gives",
    "temperature": "scores that grow with the position",
}
_OF_EXPERTS = {
    "inner_norms": "norms and scales of a router",
    "expert_scale": "norms and scales of a router",
    "expert_bias": "biases of experts",
    "router_bias": "biases of a router",
    "shared_gate": "gates of shared experts",
    "extra_parameters": "further parameters of experts",
}
_OF_LAYERS = {
    "dense": "dense branches beside experts",
    "sum_norm": "norms of a sum",
    "scaled": "layers that are scaled",
    "extra_parameters": "further parameters of layers",
    "ranks": "matrices of a lower rank",
}
_TRANSFORMS = (FeedForward, Mixture)


def oddities(model: ModelSpec) -> tuple[str, ...]:
    """What of `model` Sizes does not say, so that no flags made from Sizes would build it; () when they would."""
    shape = sizes(model)
    found = [words for layer in dict.fromkeys(model.layers) for words in _of_layer(layer)]
    if len({layer.mixer for layer in model.layers}) > 1:
        found.append("attention that differs between layers")
    kinds = [{layer.transform for layer in model.layers if isinstance(layer.transform, kind)} for kind in _TRANSFORMS]
    found += ["feed-forwards that differ between layers"] if max(map(len, kinds)) > 1 else []
    found += _of_norms(model, shape)
    dense = (layer.transform for layer in model.layers if isinstance(layer.transform, FeedForward))
    unlike = len({shape.bias, *(part.bias for part in dense)}) > 1 or (shape.bias and not shape.qkv_bias)
    found += ["biases in some products"] if unlike else []
    found += ["embeddings that are scaled"] if model.embedding.scale != 1.0 else []
    found += ["positions that are learned and rotary ones at once"] if model.embedding.positions and shape.theta else []
    found += ["encoders beside the decoder"] if model.towers else []
    found += ["a soft cap on logits"] if model.head.softcap else []
    found += ["a bias of the head"] if model.head.bias else []
    tokens = {model.embedding.tokens, model.head.tokens, *(layer.tokens for layer in model.layers)}
    found += ["layers that see a part of the tokens"] if tokens != {1.0} else []
    return tuple(dict.fromkeys(found))


def _of_layer(layer: Layer) -> Iterator[str]:
    mixer, part = layer.mixer, layer.transform
    yield from (words for field, words in _OF_LAYERS.items() if getattr(layer, field))
    if isinstance(mixer, Attention):
        yield from _of_attention(mixer)
    elif isinstance(mixer, LatentAttention):
        yield from ["sparse attention"] if mixer.indexer or mixer.dense_within else []
        yield from ["attention windows"] if mixer.window else []
        alike = mixer.norm is None or mixer.latent_eps == mixer.norm.eps
        yield from [] if alike else ["norms of unlike epsilons"]
    else:
        yield "layers without attention"
    if isinstance(mixer, (Attention, LatentAttention)) and mixer.rotary:
        yield from _of_positions(mixer.rotary, mixer.head_dim if isinstance(mixer, Attention) else mixer.rope_dim)
    if getattr(mixer, "post_norm", None) or getattr(part, "post_norm", None):
        yield "norms after a part"
    if isinstance(part, Mixture):
        yield from (words for field, words in _OF_EXPERTS.items() if getattr(part, field))
        yield from ["norms and scales of a router"] if part.router_scale != 1.0 else []
        yield from ["experts whose inputs are weighed"] if part.routing.weigh_inputs else []
        yield from [] if _shares_alike(part) else ["shared experts unlike the others"]
    elif not isinstance(part, FeedForward):
        yield "layers without a feed-forward"


def _of_attention(mixer: Attention) -> Iterator[str]:
    yield from (words for field, words in _OF_ATTENTION.items() if getattr(mixer, field))
    yield from [] if mixer.causal else ["attention that sees later tokens"]
    yield from [] if mixer.keys == 1.0 else ["attention to another sequence"]
    if mixer.qk_norm in (QueryKeyNorm.FULL, QueryKeyNorm.UNSCALED):
        yield "norms over all heads at once"


def _of_positions(rotary: Rotary, dims: int) -> Iterator[str]:
    """Of `dims` features of a head, all turn."""
    if rotary.planes is not None or rotary.dims != dims:
        yield "rotary positions on some planes alone"
    if rotary.scaling and not rotary.scaling.truncate:
        yield "frequencies whose ramp begins inside a plane"


def _shares_alike(part: Mixture) -> bool:
    """The shared expert, where there is one, is as the others and reads what they read."""
    inner = part.shared
    plain = (part.gated, part.activation, False, None, None)
    return inner is None or (inner.gated, inner.activation, inner.bias, inner.norm, inner.post_norm) == plain


def _of_norms(model: ModelSpec, shape: Sizes) -> Iterator[str]:
    """Every part is behind a norm of one kind and of one epsilon, and so is the head."""
    parts = [part for layer in model.layers for part in (layer.mixer, layer.transform)]
    norms: list[Norm | None] = [part.norm for part in dict.fromkeys(parts) if part is not None]
    if any(norm is None for norm in (*norms, model.head.norm)):
        yield "parts without a norm before them"
    if {norm.eps for norm in norms if norm} - {shape.norm_epsilon}:
        yield "norms of unlike epsilons"
    if {norm.kind.value for norm in norms if norm} - {shape.norm}:
        yield "norms of unlike kinds"
