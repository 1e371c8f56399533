"""Sizes of torchtitan's own flavors, from the model files of torchtitan 0.2.2 (torchtitan/models/*/__init__.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from meshwright.export.meaning import Sizes, routing_words, scaling_words

# dim, layers, heads, key-value heads, ffn_dim_multiplier, multiple_of
_LLAMA3 = {
    "8B": (4096, 32, 32, 8, 1.3, 1024),
    "70B": (8192, 80, 64, 8, 1.3, 4096),
    "405B": (16384, 126, 128, 8, 1.2, 4096),
}
# dim, layers, heads, key-value heads, hidden_dim, tied, theta, moe_inter_dim
_QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072, True, 1e6, 0),
    "1.7B": (2048, 28, 16, 8, 6144, True, 1e6, 0),
    "4B": (2560, 36, 32, 8, 9728, True, 1e6, 0),
    "8B": (4096, 36, 32, 8, 12288, False, 1e6, 0),
    "14B": (5120, 40, 40, 8, 17408, False, 1e6, 0),
    "32B": (5120, 64, 64, 8, 25600, False, 1e6, 0),
    "30B-A3B": (2048, 48, 32, 4, 6144, False, 1e6, 768),
    "235B-A22B": (4096, 94, 64, 4, 12288, False, 5e6, 1536),
}


def flavor(name: str, kind: str, *, sequence_length: int) -> Sizes | None:
    """The sizes of flavor `kind` of model `name`, as it is built for that length; None where it is not known here."""
    if name == "llama3" and kind in _LLAMA3:
        return _llama3(*_LLAMA3[kind])
    if name == "qwen3" and kind in _QWEN3:
        return _qwen3(*_QWEN3[kind])
    if (name, kind) != ("deepseek_v3", "671B"):
        return None
    # It stretches frequencies and sharpens scores beyond original_seq_len alone.
    stretched = replace(_DEEPSEEK_V3, scaling=_YARN, score_scale=0.135233779)
    return stretched if sequence_length > 4096 else _DEEPSEEK_V3


def flavor_of(shape: Sizes, *, sequence_length: int) -> tuple[str, str] | None:
    """The model and its flavor that have the sizes `shape`, whatever it is called; None where none has."""
    return next((each for each, sizes in _all(sequence_length) if sizes == shape), None)


def nearest_flavor(shape: Sizes, *, sequence_length: int) -> tuple[str, tuple[tuple[str, Any, Any], ...]]:
    """The flavor that has most of `shape`, and what it has otherwise: field, that of `shape`, its own."""
    found = [(f"{name} {kind}", tuple(_differing(shape, sizes))) for (name, kind), sizes in _all(sequence_length)]
    return min(found, key=lambda each: len(each[1]))


def _all(sequence_length: int) -> Iterator[tuple[tuple[str, str], Sizes]]:
    for each in _NAMED:
        sizes = flavor(*each, sequence_length=sequence_length)
        assert sizes is not None
        yield each, sizes


def _differing(ours: Sizes, theirs: Sizes) -> Iterator[tuple[str, Any, Any]]:
    for field in fields(Sizes):
        pair = getattr(ours, field.name), getattr(theirs, field.name)
        if pair[0] != pair[1]:
            yield field.name, *pair


def _llama3(dim: int, layers: int, heads: int, kv_heads: int, multiplier: float, multiple: int) -> Sizes:
    hidden = int(multiplier * int(2 * (4 * dim) / 3))
    return Sizes(
        layers=layers,
        width=dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim // heads,
        feed_forward=multiple * -(-hidden // multiple),
        vocab=128256,
        tied=False,
        gated=True,
        activation="silu",
        norm="rms",
        theta=500000.0,
        norm_epsilon=1e-5,
        scaling=_LLAMA,
    )


def _qwen3(
    dim: int, layers: int, heads: int, kv_heads: int, hidden: int, tied: bool, theta: float, experts: int
) -> Sizes:
    return Sizes(
        layers=layers,
        width=dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        feed_forward=0 if experts else hidden,
        vocab=151936,
        tied=tied,
        gated=True,
        activation="silu",
        norm="rms",
        theta=theta,
        qk_norm=True,
        mixture=(128, 8, experts, 0) if experts else (),
        with_experts=(True,) * layers if experts else (),
        norm_epsilon=1e-6,
        routing=_routed("softmax") if experts else "none",
    )


def _routed(score: str, *, scale: float = 1.0, groups: int = 1, chosen: int = 1) -> str:
    """MoEArgs, whose load_balance_coeff is 1e-3 in every flavor."""
    return routing_words(
        score,
        weighing="normalized",
        scale=scale,
        groups=groups,
        chosen=chosen,
        bias_rate=1e-3,
        balance={},
    )


_LLAMA = scaling_words("llama3", 8.0, low=1.0, high=4.0, trained=8192)
_YARN = scaling_words("yarn", 40.0, low=1.0, high=32.0, trained=4096)
_DEEPSEEK_V3 = Sizes(
    layers=61,
    width=7168,
    heads=128,
    kv_heads=128,
    head_dim=0,
    feed_forward=18432,
    vocab=129280,
    tied=False,
    gated=True,
    activation="silu",
    norm="rms",
    theta=10000.0,
    qk_norm=True,
    latent=(1536, 512, 128, 64, 128),
    norm_epsilon=1e-5,
    score_scale=0.072168784,
    routing=_routed("sigmoid", scale=2.5, groups=8, chosen=4),
    mixture=(256, 8, 2048, 2048),
    with_experts=(False,) * 3 + (True,) * 58,
)
_NAMED = (
    *(("llama3", kind) for kind in _LLAMA3),
    *(("qwen3", kind) for kind in _QWEN3),
    ("deepseek_v3", "671B"),
)
FLAVORS = tuple(f"{name} {kind}" for name, kind in _NAMED)
