"""Every parameter tensor of a block by name and shape: what costs and rules by parameter need without a module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.blocks import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter: its name inside its block (`mixer.query.weight`), and the dim that the tensor axis divides.

    Of `grid` tensors the first dim counts experts, which a grid of experts divides.
    """

    name: str
    shape: tuple[int, ...]
    divided: int | None = None
    grid: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


def tensors(block: Block) -> tuple[ParameterTensor, ...]:
    """The parameters of `block`; a tied head has no matrix of its own."""
    if isinstance(block, Embedding):
        return tuple(_embedding(block))
    if isinstance(block, Head):
        return tuple(_head(block))
    return tuple(_layer(block))


def states(block: Block) -> tuple[ParameterTensor, ...]:
    """What `block` keeps beside its parameters and no optimizer steps: the bias of choices, the scale of a layer."""
    if not isinstance(block, Layer):
        return ()
    part, found = block.transform, []
    if isinstance(part, Mixture) and part.routing.bias_rate:
        found.append(ParameterTensor(name="transform.balance", shape=(part.experts,)))
    if block.scaled:
        found.append(ParameterTensor(name="scale", shape=(1,)))
    return tuple(found)


def prefix(block: Block, index: int) -> str:
    """What the whole model puts before the names of block `index`: `layers.7.` of block 8."""
    if isinstance(block, Embedding):
        return "embedding."
    return "head." if isinstance(block, Head) else f"layers.{index - 1}."


def _embedding(block: Embedding) -> Iterator[ParameterTensor]:
    yield ParameterTensor(name="tokens.weight", shape=(block.vocab, block.width), divided=0)
    if block.positions:
        yield ParameterTensor(name="positions.weight", shape=(block.positions, block.width))


def _head(block: Head) -> Iterator[ParameterTensor]:
    yield from _norm("norm", block.norm)
    if not block.tied:
        yield ParameterTensor(name="output.weight", shape=(block.vocab, block.width), divided=0)
    if block.bias:
        yield ParameterTensor(name="output.bias", shape=(block.vocab,), divided=0)


def _layer(block: Layer) -> Iterator[ParameterTensor]:
    for place, part in (("mixer", block.mixer), ("dense", block.dense), ("transform", block.transform)):
        if part is None:
            continue
        yield from _norm(f"{place}_norm", part.norm)
        yield from _norm(f"{place}_post_norm", part.post_norm)
    if isinstance(block.mixer, Attention):
        yield from _attention(block.mixer)
    elif isinstance(block.mixer, LatentAttention):
        yield from _latent(block.mixer)
    elif isinstance(block.mixer, Recurrence):
        yield from _recurrence(block.mixer)
    if block.dense is not None:
        yield from _feed_forward("dense", block.dense)
    if isinstance(block.transform, FeedForward):
        yield from _feed_forward("transform", block.transform)
    elif isinstance(block.transform, Mixture):
        yield from _mixture(block.transform)
    yield from _norm("sum_norm", block.sum_norm)
    if block.extra_parameters:
        yield ParameterTensor(name="extra", shape=(block.extra_parameters,))


def _norm(name: str, norm: Norm | None, *, divided: int | None = None) -> Iterator[ParameterTensor]:
    if norm is None:
        return
    yield ParameterTensor(name=f"{name}.weight", shape=(norm.width,), divided=divided)
    if norm.kind is NormKind.LAYER:
        yield ParameterTensor(name=f"{name}.bias", shape=(norm.width,), divided=divided)


def _linear(
    name: str, outputs: int, inputs: int, *, divided: int | None, bias: bool = False
) -> Iterator[ParameterTensor]:
    yield ParameterTensor(name=f"{name}.weight", shape=(outputs, inputs), divided=divided)
    if bias:
        yield ParameterTensor(name=f"{name}.bias", shape=(outputs,), divided=0 if divided == 0 else None)


def _attention(mixer: Attention) -> Iterator[ParameterTensor]:
    query, key, width = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.width
    yield from _linear("mixer.query", query, width, divided=0, bias=mixer.qkv_bias)
    yield from _linear("mixer.key", key, width, divided=0, bias=mixer.qkv_bias)
    if not mixer.shared_key_value:
        yield from _linear("mixer.value", key, width, divided=0, bias=mixer.qkv_bias)
    yield from _linear("mixer.output", width, query, divided=1, bias=mixer.output_bias)
    if mixer.qk_norm is QueryKeyNorm.HEAD:
        yield from _norm("mixer.query_norm", Norm(width=mixer.head_dim))
        yield from _norm("mixer.key_norm", Norm(width=mixer.head_dim))
    if mixer.qk_norm is QueryKeyNorm.FULL:
        yield from _norm("mixer.query_norm", Norm(width=query), divided=0)
        yield from _norm("mixer.key_norm", Norm(width=key), divided=0)
    if mixer.sinks:
        yield ParameterTensor(name="mixer.sinks", shape=(mixer.heads,), divided=0)


def _latent(mixer: LatentAttention) -> Iterator[ParameterTensor]:
    query = mixer.heads * (mixer.nope_dim + mixer.rope_dim)
    if mixer.query_rank is None:
        yield from _linear("mixer.query", query, mixer.width, divided=0)
    else:
        yield from _linear("mixer.query_down", mixer.query_rank, mixer.width, divided=None)
        yield from _norm("mixer.query_norm", Norm(width=mixer.query_rank))
        yield from _linear("mixer.query_up", query, mixer.query_rank, divided=0)
    yield from _linear("mixer.kv_down", mixer.kv_rank + mixer.rope_dim, mixer.width, divided=None)
    yield from _norm("mixer.kv_norm", Norm(width=mixer.kv_rank))
    yield from _linear("mixer.kv_up", mixer.heads * (mixer.nope_dim + mixer.value_dim), mixer.kv_rank, divided=0)
    yield from _linear("mixer.output", mixer.width, mixer.heads * mixer.value_dim, divided=1)
    if mixer.indexer is not None:
        indexer, rank = mixer.indexer, mixer.query_rank or mixer.width
        yield from _linear("mixer.indexer.query", indexer.heads * indexer.head_dim, rank, divided=None)
        yield from _linear("mixer.indexer.key", indexer.head_dim, mixer.width, divided=None)
        yield from _norm("mixer.indexer.key_norm", Norm(width=indexer.head_dim, kind=NormKind.LAYER))
        yield from _linear("mixer.indexer.weights", indexer.heads, mixer.width, divided=None)


def _recurrence(mixer: Recurrence) -> Iterator[ParameterTensor]:
    """By the sizes of Mamba-2 (2405.21060): there is no module of it, and small vectors are told as one."""
    projected = 2 * mixer.inner + 2 * mixer.groups * mixer.state + mixer.heads
    yield from _linear("mixer.input", projected, mixer.width, divided=0)
    yield from _linear("mixer.output", mixer.width, mixer.inner, divided=1)
    convolved = mixer.inner + 2 * mixer.groups * mixer.state
    small = convolved * (mixer.convolution + 1) + 3 * mixer.heads + mixer.inner
    yield ParameterTensor(name="mixer.convolution.bias", shape=(small,), divided=0)


def _feed_forward(name: str, part: FeedForward) -> Iterator[ParameterTensor]:
    if part.gated:
        yield from _linear(f"{name}.gate", part.hidden, part.width, divided=0, bias=part.bias)
    yield from _linear(f"{name}.up", part.hidden, part.width, divided=0, bias=part.bias)
    yield from _linear(f"{name}.down", part.width, part.hidden, divided=1, bias=part.bias)


def _mixture(part: Mixture) -> Iterator[ParameterTensor]:
    yield from _linear("transform.router", part.experts, part.width, divided=None, bias=part.router_bias)
    yield from _norm("transform.router_norm", part.router_norm)
    yield from _norm("transform.expert_norm", part.expert_norm)
    if part.expert_scale:
        yield ParameterTensor(name="transform.expert_scale", shape=(part.experts,))
    wide, narrow = (part.experts, part.hidden, part.width), (part.experts, part.width, part.hidden)
    names = (("gate",) if part.gated else ()) + ("up",)
    for name in names:
        yield ParameterTensor(name=f"transform.experts.{name}", shape=wide, divided=1, grid=True)
    yield ParameterTensor(name="transform.experts.down", shape=narrow, divided=2, grid=True)
    if part.expert_bias:
        for name in names:
            yield ParameterTensor(name=f"transform.experts.{name}_bias", shape=wide[:2], divided=1, grid=True)
        yield ParameterTensor(name="transform.experts.down_bias", shape=narrow[:2], grid=True)
    if part.shared is not None:
        yield from _norm("transform.shared_norm", part.shared.norm)
        yield from _norm("transform.shared_post_norm", part.shared.post_norm)
        yield from _feed_forward("transform.shared", part.shared)
    if part.shared_gate:
        yield from _linear("transform.shared_gate", 1, part.width, divided=None)
    if part.extra_parameters:
        yield ParameterTensor(name="transform.extra", shape=(part.extra_parameters,))
