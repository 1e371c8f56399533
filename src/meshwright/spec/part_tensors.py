"""Every parameter tensor of a layer's part by name and shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.parts import (
    Attention,
    FeedForward,
    LatentAttention,
    Mixer,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
    Transform,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter: its name inside its block (`mixer.query.weight`), and the dim that the tensor axis divides.

    Of `grid` tensors the first dim counts experts, which a grid of experts divides. What lies in `runs`, those of
    key-value heads, is not divided further: of more tensor ranks several in a row hold the same run.
    """

    name: str
    shape: tuple[int, ...]
    divided: int | None = None
    grid: bool = False
    runs: int | None = None

    def copies(self, tensor: int) -> int:
        """How many of `tensor` ranks on a line hold what the first of them does, where the axis divides it."""
        return 1 if self.runs is None else max(tensor // self.runs, 1)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


def part_tensors(place: str, part: Mixer | Transform) -> Iterator[ParameterTensor]:
    """The parameters of `part` (a layer's `mixer`, `dense` or `transform`), but for its norms before and after."""
    if isinstance(part, Attention):
        yield from _attention(part)
    elif isinstance(part, LatentAttention):
        yield from _latent(part)
    elif isinstance(part, Recurrence):
        yield from _recurrence(part)
    elif isinstance(part, FeedForward):
        yield from _feed_forward(place, part)
    else:
        yield from _mixture(part)


def norm_tensors(
    name: str, norm: Norm | None, *, divided: int | None = None, runs: int | None = None
) -> Iterator[ParameterTensor]:
    if norm is None:
        return
    yield ParameterTensor(name=f"{name}.weight", shape=(norm.width,), divided=divided, runs=runs)
    if norm.kind is NormKind.LAYER:
        yield ParameterTensor(name=f"{name}.bias", shape=(norm.width,), divided=divided)


def _linear(
    name: str, outputs: int, inputs: int, *, divided: int | None, bias: bool = False, runs: int | None = None
) -> Iterator[ParameterTensor]:
    yield ParameterTensor(name=f"{name}.weight", shape=(outputs, inputs), divided=divided, runs=runs)
    if bias:
        yield ParameterTensor(name=f"{name}.bias", shape=(outputs,), divided=0 if divided == 0 else None, runs=runs)


def _attention(mixer: Attention) -> Iterator[ParameterTensor]:
    query, key, width = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.width
    if mixer.sinks:
        yield ParameterTensor(name="mixer.sinks", shape=(mixer.heads,), divided=0)
    yield from _linear("mixer.query", query, width, divided=0, bias=mixer.qkv_bias)
    runs = mixer.kv_heads
    yield from _linear("mixer.key", key, width, divided=0, bias=mixer.qkv_bias, runs=runs)
    if not mixer.shared_key_value:
        yield from _linear("mixer.value", key, width, divided=0, bias=mixer.qkv_bias, runs=runs)
    if mixer.gated:
        yield from _linear("mixer.gate", query, width, divided=0, bias=mixer.qkv_bias)
    if mixer.qk_norm is QueryKeyNorm.HEAD:
        yield from norm_tensors("mixer.query_norm", Norm(width=mixer.head_dim))
        yield from norm_tensors("mixer.key_norm", Norm(width=mixer.head_dim))
    if mixer.qk_norm is QueryKeyNorm.FULL:
        yield from norm_tensors("mixer.query_norm", Norm(width=query), divided=0)
        yield from norm_tensors("mixer.key_norm", Norm(width=key), divided=0, runs=runs)
    yield from _linear("mixer.output", width, query, divided=1, bias=mixer.output_bias)


def _latent(mixer: LatentAttention) -> Iterator[ParameterTensor]:
    query = mixer.heads * (mixer.nope_dim + mixer.rope_dim)
    if mixer.query_rank is None:
        yield from _linear("mixer.query", query, mixer.width, divided=0)
    else:
        yield from _linear("mixer.query_down", mixer.query_rank, mixer.width, divided=None)
        yield from norm_tensors("mixer.query_norm", Norm(width=mixer.query_rank))
        yield from _linear("mixer.query_up", query, mixer.query_rank, divided=0)
    yield from _linear("mixer.kv_down", mixer.kv_rank + mixer.rope_dim, mixer.width, divided=None)
    yield from norm_tensors("mixer.kv_norm", Norm(width=mixer.kv_rank))
    yield from _linear("mixer.kv_up", mixer.heads * (mixer.nope_dim + mixer.value_dim), mixer.kv_rank, divided=0)
    yield from _linear("mixer.output", mixer.width, mixer.heads * mixer.value_dim, divided=1)
    if mixer.indexer is not None:
        indexer, rank = mixer.indexer, mixer.query_rank or mixer.width
        yield from _linear("mixer.indexer.query", indexer.heads * indexer.head_dim, rank, divided=None)
        yield from _linear("mixer.indexer.key", indexer.head_dim, mixer.width, divided=None)
        yield from norm_tensors("mixer.indexer.key_norm", Norm(width=indexer.head_dim, kind=NormKind.LAYER))
        yield from _linear("mixer.indexer.weights", indexer.heads, mixer.width, divided=None)


def _recurrence(mixer: Recurrence) -> Iterator[ParameterTensor]:
    """By the sizes of Mamba-2 (2405.21060): there is no module of it, and small vectors are told as one."""
    yield from _linear("mixer.input", mixer.projected, mixer.width, divided=0)
    yield from _linear("mixer.output", mixer.width, mixer.inner, divided=1)
    yield ParameterTensor(name="mixer.convolution.bias", shape=(mixer.small_parameters,), divided=0)


def _feed_forward(name: str, part: FeedForward) -> Iterator[ParameterTensor]:
    if part.gated:
        yield from _linear(f"{name}.gate", part.hidden, part.width, divided=0, bias=part.bias)
    yield from _linear(f"{name}.up", part.hidden, part.width, divided=0, bias=part.bias)
    yield from _linear(f"{name}.down", part.width, part.hidden, divided=1, bias=part.bias)


def _mixture(part: Mixture) -> Iterator[ParameterTensor]:
    if part.expert_scale:
        yield ParameterTensor(name="transform.expert_scale", shape=(part.experts,))
    yield from _linear("transform.router", part.experts, part.width, divided=None, bias=part.router_bias)
    yield from norm_tensors("transform.router_norm", part.router_norm)
    yield from norm_tensors("transform.expert_norm", part.expert_norm)
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
        yield from norm_tensors("transform.shared_norm", part.shared.norm)
        yield from norm_tensors("transform.shared_post_norm", part.shared.post_norm)
        yield from _feed_forward("transform.shared", part.shared)
    if part.shared_gate:
        yield from _linear("transform.shared_gate", 1, part.width, divided=None)
    if part.extra_parameters:
        yield ParameterTensor(name="transform.extra", shape=(part.extra_parameters,))
