"""Small models of every kind the decoder builds."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.model import (
    Activation,
    Attention,
    Choice,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    MatrixRank,
    Mixture,
    ModelSpec,
    Norm,
    NormKind,
    QueryKeyNorm,
    Rotary,
    RotaryScaling,
    Routing,
    Score,
    Temperature,
    Weighing,
)
from meshwright.spec.ranks import factorable

WIDTH, HEADS, VOCAB = 32, 4, 64
NORM = Norm(width=WIDTH)


def attention(**changes: object) -> Attention:
    base = Attention(width=WIDTH, heads=HEADS, kv_heads=2, head_dim=8, norm=NORM, rotary=Rotary(dims=8))
    return replace(base, **changes)  # type: ignore[arg-type]  # the fields of a test case


def feed_forward(**changes: object) -> FeedForward:
    return replace(FeedForward(width=WIDTH, hidden=64, norm=NORM), **changes)  # type: ignore[arg-type]  # as above


def model(name: str = "tiny", *, layer: Layer | None = None, layers: int = 4, **changes: object) -> ModelSpec:
    layer = layer or Layer(mixer=attention(), transform=feed_forward())
    base = ModelSpec(
        name=name,
        embedding=Embedding(vocab=VOCAB, width=WIDTH),
        layers=(layer,) * layers,
        head=Head(vocab=VOCAB, width=WIDTH, norm=NORM),
        max_positions=64,
        initializer_range=0.2,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # as above


def mixture(**changes: object) -> Mixture:
    base = Mixture(width=WIDTH, hidden=16, experts=4, top_k=2, norm=NORM)
    return replace(base, **changes)  # type: ignore[arg-type]  # as above


def latent(**changes: object) -> LatentAttention:
    base = LatentAttention(
        width=WIDTH,
        heads=HEADS,
        query_rank=12,
        kv_rank=16,
        nope_dim=8,
        rope_dim=4,
        value_dim=6,
        norm=NORM,
        rotary=Rotary(dims=4),
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # as above


ROUTINGS = {
    "softmax": Routing(weighing=Weighing.SCORE, balance_loss=0.02),
    "sigmoid": Routing(score=Score.SIGMOID, bias_rate=0.05, scale=1.5),
    "groups": Routing(score=Score.SIGMOID, groups=4, chosen_groups=2, scale=2.5, bias_rate=0.05),
    "capacity": Routing(capacity=0.75),
    "prototypes": Routing(choice=Choice.PROTOTYPES, bias_rate=0.01),
    "bounded prototypes": Routing(choice=Choice.PROTOTYPES, bias_rate=0.01, capacity=1.25),
    "balanced": Routing(weighing=Weighing.SCORE, weigh_inputs=True, balance_loss=0.1),
}
# What counts choices along whole sequences.
COUNTED = tuple(name for name, how in ROUTINGS.items() if how.capacity is not None or how.balance_loss)


def routed(spec: ModelSpec, routing: Routing) -> ModelSpec:
    """The same with `routing` in every mixture."""
    layers = [
        replace(layer, transform=replace(layer.transform, routing=routing))
        if isinstance(layer.transform, Mixture)
        else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def shallow(spec: ModelSpec, *, layers: int = 2) -> ModelSpec:
    """The same of its first layers: where what is done to one layer is done to all."""
    return replace(spec, layers=spec.layers[:layers])


def gpt(*, layers: int = 4) -> ModelSpec:
    """Layer norms, biases, learned positions, no rotary, no gate: the GPT-2 form, with a tied head."""
    norm = Norm(width=WIDTH, kind=NormKind.LAYER)
    layer = Layer(
        mixer=attention(norm=norm, rotary=None, kv_heads=HEADS, qkv_bias=True, output_bias=True),
        transform=feed_forward(norm=norm, gated=False, bias=True, activation=Activation.GELU_TANH),
    )
    return model(
        "gpt",
        layer=layer,
        layers=layers,
        embedding=Embedding(vocab=VOCAB, width=WIDTH, positions=64),
        head=Head(vocab=VOCAB, width=WIDTH, norm=norm, tied=True),
    )


LAYERS = {
    "plain": Layer(mixer=attention(), transform=feed_forward()),
    "window": Layer(mixer=attention(window=5), transform=feed_forward(hidden=48)),
    "sinks": Layer(mixer=attention(window=3, sinks=True), transform=None),
    "softcap": Layer(mixer=attention(softcap=7.0, scale=0.3, kv_heads=HEADS), transform=feed_forward(gated=False)),
    "chunk": Layer(mixer=attention(chunk=6, qk_norm=QueryKeyNorm.FULL, qkv_bias=True), transform=feed_forward()),
    "latent": Layer(mixer=latent(), transform=feed_forward(hidden=48)),
    "latent window": Layer(mixer=latent(window=5), transform=feed_forward()),
    "latent prefix": Layer(mixer=latent(query_rank=None, prefix=0.5), transform=feed_forward()),
    "mixture": Layer(mixer=attention(), transform=mixture()),
    "mixture after sinks": Layer(mixer=attention(sinks=True), transform=mixture(expert_bias=True, router_bias=True)),
    "mixture after softcap": Layer(mixer=attention(softcap=7.0), transform=mixture(gated=False)),
    "mixture after latent window": Layer(
        mixer=latent(window=5), transform=mixture(shared=feed_forward(norm=None, hidden=24), shared_gate=True)
    ),
    "mixture after latent prefix": Layer(mixer=latent(prefix=0.5, window=4), transform=mixture()),
}


def with_vocab(spec: ModelSpec, vocab: int) -> ModelSpec:
    """The same with another vocabulary."""
    return replace(spec, embedding=replace(spec.embedding, vocab=vocab), head=replace(spec.head, vocab=vocab))


def with_kv_heads(spec: ModelSpec, kv_heads: int) -> ModelSpec:
    """The same, every second layer of attention with so many key-value heads."""
    layers = [
        replace(layer, mixer=replace(layer.mixer, kv_heads=kv_heads))
        if index % 2 == 0 and isinstance(layer.mixer, Attention)
        else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def with_prefix(spec: ModelSpec, share: float = 0.5) -> ModelSpec:
    """The same, every second layer with a prefix mask."""
    layers = [
        replace(layer, mixer=replace(layer.mixer, prefix=share)) if index % 2 == 0 and layer.mixer else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def factored(spec: ModelSpec) -> ModelSpec:
    """The same with products of two thin matrices of half the full rank: every one that can be of each third layer, and
    of the layer after it the first and the last."""
    ranks = {}
    for index, layer in enumerate(spec.layers, start=1):
        found = [MatrixRank(name=name, rank=min(shape) // 2) for name, shape in factorable(layer.places).items()]
        ranks[index] = (found, found[:1] + found[1:][-1:], [])[(index - 1) % 3]
    return spec.with_ranks(ranks)


def prefixed() -> ModelSpec:
    """Prefix masks of every kind, and a causal one between them."""
    mixers = (
        attention(prefix=0.5),
        attention(),
        attention(prefix=0.5, window=5),
        attention(prefix=0.5, chunk=6, sinks=True),
        latent(prefix=0.5),
    )
    layers = tuple(Layer(mixer=mixer, transform=feed_forward()) for mixer in mixers)
    return replace(model("prefixed"), layers=layers)


def beside() -> ModelSpec:
    """Experts beside a dense branch, each with norms of its own, a scaled layer, normed values: gemma4's form."""
    last = {"post_norm": NORM, "qk_norm": QueryKeyNorm.HEAD, "value_norm": True, "scale": 1.0}
    turn = Rotary(dims=16, theta=100.0, planes=2)
    full = attention(head_dim=16, rotary=turn, shared_key_value=True, **last)
    routed = mixture(
        norm=None,
        post_norm=NORM,
        activation=Activation.GELU_TANH,
        router_norm=NORM,
        router_scale=WIDTH**-0.5,
        expert_norm=NORM,
        expert_scale=True,
    )
    dense = feed_forward(hidden=48, post_norm=NORM, activation=Activation.GELU_TANH)
    layers = tuple(
        Layer(mixer=mixer, transform=routed, dense=dense, sum_norm=NORM, scaled=True)
        for mixer in (full, attention(window=5, **last))
    )
    return replace(model("mixture_beside"), layers=layers * 2)


def all_models() -> dict[str, ModelSpec]:
    """One model per feature of the decoder."""
    scaling = RotaryScaling(kind="llama3", factor=8.0, trained_positions=32)
    yarn = RotaryScaling(kind="yarn", factor=4.0, low_frequency=1.0, high_frequency=32.0, trained_positions=16)
    ff = feed_forward()

    def with_mixer(name: str, **changes: object) -> ModelSpec:
        return model(name, layer=Layer(mixer=attention(**changes), transform=ff))

    shared = feed_forward(norm=None, hidden=24)
    return {
        "tiny": model(),
        "gpt": gpt(),
        "tied": model("tied", head=Head(vocab=VOCAB, width=WIDTH, norm=NORM, tied=True)),
        "llama3": with_mixer("llama3", rotary=Rotary(dims=8, scaling=scaling)),
        "yarn": with_mixer("yarn", rotary=Rotary(dims=8, scaling=yarn)),
        "partial": with_mixer("partial", rotary=Rotary(dims=4)),
        "window": with_mixer("window", window=5),
        "chunk": with_mixer("chunk", chunk=6),
        "head_norm": with_mixer("head_norm", qk_norm=QueryKeyNorm.HEAD, post_norm=NORM),
        "full_norm": with_mixer("full_norm", qk_norm=QueryKeyNorm.FULL),
        "unscaled_norm": with_mixer("unscaled_norm", qk_norm=QueryKeyNorm.UNSCALED),
        "biases": with_mixer("biases", qkv_bias=True, output_bias=True),
        "sinks": with_mixer("sinks", sinks=True, window=5),
        "softcap": with_mixer("softcap", softcap=10.0, scale=0.3),
        "shared_key_value": with_mixer("shared_key_value", shared_key_value=True),
        "mixture": model("mixture", layer=Layer(mixer=attention(), transform=mixture())),
        "mixture_full": model(
            "mixture_full",
            layer=Layer(
                mixer=attention(),
                transform=mixture(expert_bias=True, router_bias=True, shared=shared, shared_gate=True),
            ),
        ),
        "mixture_weighed_inputs": model(
            "mixture_weighed_inputs",
            layer=Layer(
                mixer=attention(rotary=None, temperature=Temperature(positions=4, gain=0.3)),
                transform=mixture(
                    shared=shared,
                    routing=Routing(score=Score.SIGMOID, weighing=Weighing.SCORE, weigh_inputs=True),
                ),
            ),
        ),
        "mixture_plain": model("mixture_plain", layer=Layer(mixer=attention(), transform=mixture(gated=False))),
        "latent": model("latent", layer=Layer(mixer=latent(), transform=ff)),
        "latent_direct": model("latent_direct", layer=Layer(mixer=latent(query_rank=None), transform=ff)),
        "attention_only": model("attention_only", layer=Layer(mixer=attention(), transform=None)),
        "head_softcap": model("head_softcap", head=Head(vocab=VOCAB, width=WIDTH, norm=NORM, softcap=5.0, bias=True)),
        "mixture_beside": beside(),
    }
