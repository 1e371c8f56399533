"""Families of decoders by the few numbers that shape them; `build` writes out the whole ModelSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.catalog.figures import brief
from meshwright.catalog.model_ranges import MOST, MOST_LAYERS, too_deep
from meshwright.spec.blocks import (
    Activation,
    Attention,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Norm,
    NormKind,
)
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import ModelSpec
from meshwright.spec.positions import Rotary, RotaryScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaStyle:
    """RMS norm, rotary positions, grouped-query attention, gated SiLU (2302.13971, 2307.09288).

    `hidden` is the width of the feed-forward; `head_dim` None is width / heads; `kv_heads` None is `heads`.
    `prefix` is that of Attention.
    """

    name: str
    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 4096
    theta: float = 10000.0
    scaling: RotaryScaling | None = None
    tied: bool = False
    eps: float = 1e-5
    prefix: float = 0.0
    source: str = ""
    kind: str = "llama"
    schema: int = 1

    def build(self) -> ModelSpec:
        """The model. Raises ConfigError with every number that is not possible."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        check_shape(self.layers, self.width, self.heads, kv_heads, self.head_dim, hidden=self.hidden, vocab=self.vocab)
        norm = Norm(width=self.width, eps=self.eps)
        head_dim = self.head_dim or self.width // self.heads
        mixer = Attention(
            width=self.width,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm=norm,
            rotary=Rotary(dims=head_dim, theta=self.theta, scaling=self.scaling),
            prefix=self.prefix,
        )
        layer = Layer(mixer=mixer, transform=FeedForward(width=self.width, hidden=self.hidden, norm=norm))
        return ModelSpec(
            name=self.name,
            embedding=Embedding(vocab=self.vocab, width=self.width),
            layers=(layer,) * self.layers,
            head=Head(vocab=self.vocab, width=self.width, norm=norm, tied=self.tied),
            max_positions=self.max_positions,
            source=self.source,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GptStyle:
    """Layer norm, learned positions, biases, two feed-forward matrices, tied head (GPT-2, GPT-3, 2005.14165).

    `hidden` None is four times the width; `head_dim` None is width / heads; `rotary_fraction` > 0 replaces the learned
    positions; `prefix` is that of Attention.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocab: int = 50257
    positions: int = 1024
    hidden: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    activation: Activation = Activation.GELU_TANH
    bias: bool = True
    tied: bool = True
    rotary_fraction: float = 0.0
    prefix: float = 0.0
    source: str = ""
    kind: str = "gpt"
    schema: int = 1

    def build(self) -> ModelSpec:
        """The model. Raises ConfigError with every number that is not possible."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        hidden = 4 * self.width if self.hidden is None else self.hidden
        check_shape(self.layers, self.width, self.heads, kv_heads, self.head_dim, hidden=hidden, vocab=self.vocab)
        norm = Norm(width=self.width, kind=NormKind.LAYER)
        head_dim = self.head_dim or self.width // self.heads
        learned = self.rotary_fraction == 0.0
        mixer = Attention(
            width=self.width,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm=norm,
            rotary=None if learned else Rotary(dims=int(head_dim * self.rotary_fraction)),
            prefix=self.prefix,
            qkv_bias=self.bias,
            output_bias=self.bias,
        )
        transform = FeedForward(
            width=self.width, hidden=hidden, norm=norm, gated=False, activation=self.activation, bias=self.bias
        )
        return ModelSpec(
            name=self.name,
            embedding=Embedding(vocab=self.vocab, width=self.width, positions=self.positions if learned else 0),
            layers=(Layer(mixer=mixer, transform=transform),) * self.layers,
            head=Head(vocab=self.vocab, width=self.width, norm=norm, tied=self.tied),
            max_positions=self.positions,
            source=self.source,
        )


Shape = LlamaStyle | GptStyle


def check_shape(
    layers: int, width: int, heads: int, kv_heads: int, head_dim: int | None, *, hidden: int, vocab: int
) -> None:
    """Raise ConfigError with every number of a decoder that cannot be."""
    named = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "hidden": hidden, "vocab": vocab}
    problems = [
        Problem(what=f"{number} is not a positive number", where=name) for name, number in named.items() if number < 1
    ]
    problems += [
        Problem(what=f"{brief(number)} is more than any model has", where=name, fix=f"choose {MOST:,} or less")
        for name, number in named.items()
        if number > MOST
    ]
    if MOST_LAYERS < layers <= MOST:
        problems.append(too_deep(layers, "layers"))
    if head_dim is not None and not 1 <= head_dim <= MOST:
        problems.append(Problem(what=f"not a number from 1 to {MOST:,}", where="head_dim"))
    if not problems and head_dim is None and width % heads:
        fix = f"use heads = {nearest_divisor(width, heads)}, or say head_dim"
        problems.append(Problem(what=f"width {width} is not a multiple of heads {heads}", where="heads", fix=fix))
    if not problems and heads % kv_heads:
        fix = f"use kv_heads = {nearest_divisor(heads, kv_heads)}"
        what = f"heads {heads} is not a multiple of kv_heads {kv_heads}"
        problems.append(Problem(what=what, where="kv_heads", fix=fix))
    if problems:
        raise ConfigError(problems)


def nearest_divisor(number: int, near: int) -> int:
    """The divisor of `number` that is nearest to `near`."""
    low = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return min((*low, *(number // each for each in low)), key=lambda candidate: (abs(candidate - near), candidate))
