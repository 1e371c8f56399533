"""The parts a layer is made of, with every dimension that costs time or memory; each counts its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.positions import Rotary, Temperature
from meshwright.spec.routing import TOP_K_SOFTMAX, Routing


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    """`clamped_swiglu` is of gated parts alone: g sigmoid(1.702 g) (u + 1) with both clamped at 7, as in gpt-oss."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    CLAMPED_SWIGLU = "clamped_swiglu"


class QueryKeyNorm(StrEnum):
    """Norm on queries and keys: none, over each head, over all heads at once, or per head without a scale."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"
    UNSCALED = "unscaled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Root-mean-square or layer norm over `width` features; layer norm has a bias beside its scale."""

    width: int
    kind: NormKind = NormKind.RMS
    eps: float = 1e-5

    @property
    def parameters(self) -> int:
        return self.width * (2 if self.kind is NormKind.LAYER else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head attention; `kv_heads < heads` is grouped-query; `window` limits how far back it looks.

    Without `causal` every token sees all of its sequence, as in an encoder, or `keys` times as many tokens of another
    one: a decoder's attention to what an encoder gave.

    `chunk` is chunked attention (positions see only their own chunk). `shared_key_value` uses the keys as values, as
    they are projected. With `value_norm` the values of each head are normed, without a scale. `gated`, what the heads
    give is multiplied by the sigmoid of one more projection of the same size as the queries (2505.06708).

    Above 0 `prefix` is a prefix mask (1910.10683, section 3.2.1; 2205.05131): the tokens of a document's prompt, its
    prefix, see all of it, within `window` and `chunk` both ways. The data tell how long prompts are; costs count one
    document a sequence, and `prefix` is the share of it that is prompt.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: Norm | None
    post_norm: Norm | None = None
    rotary: Rotary | None = None
    window: int | None = None
    chunk: int | None = None
    prefix: float = 0.0
    qk_norm: QueryKeyNorm = QueryKeyNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    temperature: Temperature | None = None
    shared_key_value: bool = False
    value_norm: bool = False
    gated: bool = False
    causal: bool = True
    keys: float = 1.0
    kind: str = "attention"

    @property
    def matrix_parameters(self) -> int:
        of_queries = 3 if self.gated else 2
        projections = of_queries * self.heads + self.kv_heads * (1 if self.shared_key_value else 2)
        return self.width * self.head_dim * projections

    @property
    def matrix_products(self) -> float:
        """Parameters that a token multiplies: those of keys and values as often as there are keys for a query."""
        key_values = self.width * self.head_dim * self.kv_heads * (1 if self.shared_key_value else 2)
        return self.matrix_parameters + (self.keys - 1.0) * key_values

    @property
    def parameters(self) -> int:
        kv_projections = 1 if self.shared_key_value else 2
        queries = self.heads * (2 if self.gated else 1)
        biases = self.head_dim * (queries + self.kv_heads * kv_projections) if self.qkv_bias else 0
        biases += self.width if self.output_bias else 0
        query_key = {
            QueryKeyNorm.HEAD: 2 * self.head_dim,
            QueryKeyNorm.FULL: self.head_dim * (self.heads + self.kv_heads),
        }.get(self.qk_norm, 0)
        return self.matrix_parameters + biases + query_key + (self.heads if self.sinks else 0) + _norms(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Lightning indexer of sparse attention: chooses the `top_k` keys each query reads (DeepSeek sparse attention)."""

    heads: int
    head_dim: int
    top_k: int

    def parameters(self, width: int, query_rank: int) -> int:
        key = width * self.head_dim + 2 * self.head_dim
        return query_rank * self.heads * self.head_dim + key + width * self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries and key-values pass through low-rank latents (DeepSeek-V2, 2405.04434).

    `query_rank` None means queries are projected directly. `scale` multiplies the scores, one over the root of their
    dims when None. `latent_eps` is that of the norms of latents. With `dense_within` this stands for a sparse attention
    that reads so many keys: for longer sequences it is another one. `window` and `prefix` are those of Attention.
    """

    width: int
    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: Norm | None
    post_norm: Norm | None = None
    rotary: Rotary | None = None
    indexer: Indexer | None = None
    dense_within: int | None = None
    window: int | None = None
    prefix: float = 0.0
    scale: float | None = None
    latent_eps: float = 1e-6
    kind: str = "latent_attention"

    @property
    def matrix_parameters(self) -> int:
        query_dims = self.heads * (self.nope_dim + self.rope_dim)
        rank = self.query_rank
        query = self.width * query_dims if rank is None else self.width * rank + rank * query_dims
        keys = self.width * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (
            self.nope_dim + self.value_dim
        )
        return query + keys + self.heads * self.value_dim * self.width

    @property
    def parameters(self) -> int:
        indexer = self.indexer.parameters(self.width, self.query_rank or self.width) if self.indexer else 0
        return self.matrix_parameters + (self.query_rank or 0) + self.kv_rank + indexer + _norms(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A state-space or linear-attention mixer, by its sizes: `inner` features, `state` per head, short convolution.

    By the `delta` rule (2406.06484) a state is corrected by what it would have answered, by a strength that the token
    says beside its decay; its convolution has no bias, no input passes it by, and the norm of what it gives is one for
    all heads. Others norm all inner features, or none where `output_norm` is false.
    """

    width: int
    inner: int
    heads: int
    state: int
    groups: int
    convolution: int
    norm: Norm | None
    post_norm: Norm | None = None
    delta: bool = False
    output_norm: bool = True
    kind: str = "recurrence"

    @property
    def projected(self) -> int:
        """Features that its first product gives: values and their gate, keys, queries, and what steers each head."""
        return 2 * self.inner + 2 * self.groups * self.state + self.steers * self.heads

    @property
    def steers(self) -> int:
        """Numbers that a token has for each head: its step, and by the delta rule how far to correct."""
        return 2 if self.delta else 1

    @property
    def small_parameters(self) -> int:
        """Of the convolution, of each head and of the norm before the last product; no matrix product uses them."""
        taps, of_heads = self.convolution + (0 if self.delta else 1), 2 if self.delta else 3
        normed = self.inner // self.heads if self.delta else self.inner
        convolved = self.inner + 2 * self.groups * self.state
        return convolved * taps + of_heads * self.heads + (normed if self.output_norm else 0)

    @property
    def matrix_parameters(self) -> int:
        return self.width * self.projected + self.inner * self.width

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + self.small_parameters + _norms(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Two matrices and an activation between, or three when gated (GLU variants, 2002.05202)."""

    width: int
    hidden: int
    norm: Norm | None
    post_norm: Norm | None = None
    gated: bool = True
    activation: Activation = Activation.SILU
    bias: bool = False
    kind: str = "feed_forward"

    @property
    def matrix_parameters(self) -> int:
        return self.width * self.hidden * (3 if self.gated else 2)

    @property
    def parameters(self) -> int:
        biases = (self.hidden * (2 if self.gated else 1) + self.width) if self.bias else 0
        return self.matrix_parameters + biases + _norms(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """`top_k` of `experts` feed-forwards per token, with an optional dense branch that every token takes.

    After `norm`, or in place of it, `router_norm` and `expert_norm` are of what the router and the experts read alone.
    `router_scale` multiplies what the router gives. With `expert_scale` the weight of an expert is multiplied by a
    learned number of its own.

    `extra_parameters` counts scales that no matrix product uses.
    """

    width: int
    hidden: int
    experts: int
    top_k: int
    norm: Norm | None
    post_norm: Norm | None = None
    gated: bool = True
    activation: Activation = Activation.SILU
    expert_bias: bool = False
    router_bias: bool = False
    shared: FeedForward | None = None
    shared_gate: bool = False
    routing: Routing = TOP_K_SOFTMAX
    router_norm: Norm | None = None
    router_scale: float = 1.0
    expert_norm: Norm | None = None
    expert_scale: bool = False
    extra_parameters: int = 0
    kind: str = "mixture"

    @property
    def inner_norms(self) -> tuple[Norm, ...]:
        return tuple(norm for norm in (self.router_norm, self.expert_norm) if norm)

    @property
    def gate_parameters(self) -> int:
        """Of what weighs experts beside the router's matrix: norms, biases and scales."""
        vectors = self.experts * (self.router_bias + self.expert_scale)
        return sum(norm.parameters for norm in self.inner_norms) + vectors

    @property
    def expert_parameters(self) -> int:
        biases = (self.hidden * (2 if self.gated else 1) + self.width) if self.expert_bias else 0
        return self.width * self.hidden * (3 if self.gated else 2) + biases

    @property
    def matrix_parameters(self) -> int:
        """Parameters that one token multiplies: the router, its `top_k` experts and the dense branch."""
        expert = self.width * self.hidden * (3 if self.gated else 2)
        return self.width * self.experts + self.top_k * expert + (self.shared.matrix_parameters if self.shared else 0)

    @property
    def dropped_products(self) -> float:
        """Those of `matrix_parameters` that no token multiplies in the mean, as its choice was dropped."""
        expert = self.width * self.hidden * (3 if self.gated else 2)
        return (1.0 - self.routing.kept_share) * self.top_k * expert

    @property
    def parameters(self) -> int:
        router = self.width * self.experts + self.gate_parameters
        shared = (self.shared.parameters if self.shared else 0) + (self.width if self.shared_gate else 0)
        return router + self.experts * self.expert_parameters + shared + self.extra_parameters + _norms(self)

    @property
    def active_parameters(self) -> int:
        return self.parameters - (self.experts - self.top_k) * self.expert_parameters


Mixer = Attention | LatentAttention | Recurrence
Transform = FeedForward | Mixture


def _norms(part: Mixer | Transform) -> int:
    return sum(norm.parameters for norm in (part.norm, part.post_norm) if norm)
