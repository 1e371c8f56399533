"""Encoders, and encoders beside decoders: bert, roberta, t5, mt5."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.encoders import encoder, encoder_decoder
from meshwright.catalog.huggingface.reader import ACTIVATIONS, Reader
from meshwright.catalog.huggingface.state_space import UNBOUNDED
from meshwright.spec.blocks import Activation, Attention, Embedding, FeedForward, Head, Layer, Norm, NormKind
from meshwright.spec.model import ModelSpec

MOST_BUCKETS = 2**20


def bert(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """An encoder with a head over every token (masked language modelling), tied to the embedding.

    Its norms, which are of sums, are told as those before the next part: the embedding's is the first layer's. What
    only the embedding and the head have, types of tokens and a dense layer with a norm, is counted with the first and
    the last layer.
    """
    reader.only("position_embedding_type", "absolute")
    reader.only("is_decoder", False)
    reader.only("add_cross_attention", False)
    heads, vocab = reader.heads(), reader.integer("vocab_size")
    width, positions = heads.width, reader.integer("max_position_embeddings", 512)
    norm = Norm(width=width, kind=NormKind.LAYER, eps=reader.number("layer_norm_eps", 1e-12))
    mixer = Attention(
        width=width,
        heads=heads.heads,
        kv_heads=heads.heads,
        head_dim=heads.head_dim,
        norm=norm,
        qkv_bias=True,
        output_bias=True,
    )
    activation = reader.activation("hidden_act") if reader.has("hidden_act") else Activation.GELU
    hidden = reader.integer("intermediate_size")
    transform = FeedForward(width=width, hidden=hidden, norm=norm, gated=False, activation=activation, bias=True)
    model = ModelSpec(
        name=name,
        embedding=Embedding(vocab=vocab, width=width, positions=positions),
        layers=(Layer(mixer=mixer, transform=transform),) * reader.layers(),
        head=Head(vocab=vocab, width=width, norm=norm, tied=reader.flag("tie_word_embeddings", True), bias=True),
        max_positions=positions,
        initializer_range=reader.number("initializer_range", 0.02),
        source=source,
    )
    types = reader.integer("type_vocab_size", 2) * width
    return _with_extra(encoder(model), {0: types, -1: width * width + width + norm.parameters})


def t5(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """An encoder and a decoder that reads as many tokens; positions are biases of scores, which two layers count.

    The norm after the encoder is counted with its last layer.
    """
    width, heads, vocab = reader.integer("d_model"), reader.integer("num_heads"), reader.integer("vocab_size")
    encoders = reader.layers("num_layers")
    decoders = reader.layers("num_decoder_layers") if reader.has("num_decoder_layers") else encoders
    norm = Norm(width=width, eps=reader.number("layer_norm_epsilon", 1e-6))
    mixer = Attention(width=width, heads=heads, kv_heads=heads, head_dim=reader.integer("d_kv"), norm=norm, scale=1.0)
    model = ModelSpec(
        name=name,
        embedding=Embedding(vocab=vocab, width=width),
        layers=(Layer(mixer=mixer, transform=_feed_forward(reader, norm)),),
        head=Head(vocab=vocab, width=width, norm=norm, tied=reader.flag("tie_word_embeddings", True)),
        max_positions=UNBOUNDED,
        source=source,
    )
    biases = reader.integer("relative_attention_num_buckets", 32, most=MOST_BUCKETS) * heads
    whole = encoder_decoder(model, encoders=encoders, decoders=decoders)
    return _with_extra(_with_extra(whole, {0: biases, encoders: biases}), {encoders - 1: norm.parameters})


def _feed_forward(reader: Reader, norm: Norm) -> FeedForward:
    """`relu`, or `gated-gelu`, whose gelu is the approximated one; other activations by their names."""
    told = reader.values.get("feed_forward_proj", "relu")
    words = told.split("-") if isinstance(told, str) else [""]
    gated, plain = words[0] == "gated" and len(words) == 2, words[-1]
    if plain not in ACTIVATIONS or len(words) - gated != 1:
        fix = f"one of {', '.join(sorted(ACTIVATIONS))}, or one of them after gated-"
        reader.note("feed_forward_proj", f"{told!r} is unknown", fix=fix)
    activation = Activation.GELU_TANH if told == "gated-gelu" else ACTIVATIONS.get(plain, Activation.RELU)
    return FeedForward(width=norm.width, hidden=reader.integer("d_ff"), norm=norm, gated=gated, activation=activation)


def _with_extra(model: ModelSpec, extra: dict[int, int]) -> ModelSpec:
    """The model with so many more parameters in these layers."""
    layers = list(model.layers)
    for index, count in extra.items():
        layers[index] = replace(layers[index], extra_parameters=layers[index].extra_parameters + count)
    return replace(model, layers=tuple(layers))
