"""Encoders, and encoders beside decoders, as layers in one row: what a model of decoder layers becomes."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.blocks import Attention, Layer
from meshwright.spec.model import ModelSpec


def encoder(model: ModelSpec) -> ModelSpec:
    """The model whose tokens all see each other."""
    alike = {layer: replace(layer, mixer=_seeing_all(layer)) for layer in dict.fromkeys(model.layers)}
    return replace(model, layers=tuple(alike[layer] for layer in model.layers))


def encoder_decoder(model: ModelSpec, *, encoders: int, decoders: int, share: float = 1.0) -> ModelSpec:
    """`encoders` layers like the first of `model` that see all, then `decoders` that also attend to what those give.

    The latter see `share` tokens for each of the former's, and each is two layers: attention to its own tokens, then
    attention to the encoder's with the feed-forward. Attention to the encoder's tokens is attention that sees all,
    whose keys and values have a projection each. The head is over the decoder's tokens, the embedding over both.
    """
    layer = model.layers[0]
    seeing = replace(layer, mixer=_seeing_all(layer))
    own = replace(layer, transform=None, tokens=share)
    across = replace(layer, mixer=replace(_seeing_all(layer), keys=1.0 / share), tokens=share)
    return replace(
        model,
        embedding=replace(model.embedding, tokens=1.0 + share),
        layers=(seeing,) * encoders + (own, across) * decoders,
        head=replace(model.head, tokens=share),
    )


def _seeing_all(layer: Layer) -> Attention:
    assert isinstance(layer.mixer, Attention)
    return replace(layer.mixer, causal=False)
