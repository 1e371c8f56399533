"""ModelSpec: a model as blocks in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.spec.blocks import (
    Activation,
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    Indexer,
    LatentAttention,
    Layer,
    Mixer,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
    Rotary,
    RotaryScaling,
    Transform,
)
from meshwright.spec.routing import Choice, Routing, Score, Weighing

__all__ = [
    "Activation",
    "Attention",
    "Block",
    "Choice",
    "Embedding",
    "FeedForward",
    "Head",
    "Indexer",
    "LatentAttention",
    "Layer",
    "Mixer",
    "Mixture",
    "ModelSpec",
    "Norm",
    "NormKind",
    "QueryKeyNorm",
    "Recurrence",
    "Rotary",
    "RotaryScaling",
    "Routing",
    "Score",
    "Tower",
    "Transform",
    "Weighing",
    "score_flops_per_token",
    "visible_keys",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder beside the decoder (vision, audio): counted, and carried by the first stage."""

    name: str
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder as blocks in order: block 0 embeds, blocks 1 … L are layers, block L + 1 is the head."""

    name: str
    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head
    max_positions: int
    towers: tuple[Tower, ...] = ()
    initializer_range: float = 0.02
    source: str = ""
    schema: int = 1

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.embedding, *self.layers, self.head)

    @property
    def width(self) -> int:
        return self.embedding.width

    @property
    def vocab(self) -> int:
        return self.embedding.vocab

    @property
    def parameters(self) -> int:
        """Every parameter of the real module, tied ones once."""
        return sum(block.parameters for block in self.blocks) + sum(tower.parameters for tower in self.towers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: a mixture counts only the experts it chooses."""
        return self.parameters - sum(layer.parameters - layer.active_parameters for layer in self.layers)

    @property
    def layer_kinds(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers and how many there are of each, in order of first appearance."""
        return tuple(Counter(self.layers).items())

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs to train on one token: the one formula behind every MFU this system prints.

        Six per parameter in a matrix product (head included, embedding look-up not) and twelve per head feature and
        visible key, counting only keys that the mask shows: recompute never counts (PaLM, 2204.02311, appendix B,
        with the causal mask).
        """
        matrices = sum(block.tokens * block.matrix_products for block in self.blocks)
        return 6.0 * matrices + 3.0 * self.score_flops_per_token(sequence_length)

    def score_flops_per_token(self, sequence_length: int) -> float:
        """Forward FLOPs of queries by keys and scores by values over all layers, per token of the job's sequences."""
        each = ((layer.tokens, max(1, round(layer.tokens * sequence_length)), layer) for layer in self.layers)
        return sum(tokens * score_flops_per_token(layer, length) for tokens, length, layer in each)


def score_flops_per_token(layer: Layer, sequence_length: int) -> float:
    """Forward FLOPs per token of queries by keys and scores by values, over the keys the mask shows.

    `sequence_length` tokens of the layer's own.
    """
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        span = visible_keys(sequence_length, mixer.window, mixer.chunk, causal=mixer.causal)
        return 4.0 * mixer.heads * mixer.head_dim * span * mixer.keys
    if isinstance(mixer, LatentAttention):
        limit = mixer.indexer.top_k if mixer.indexer else mixer.window
        span = visible_keys(sequence_length, limit, None)
        scores = 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim) * span
        indexer = mixer.indexer
        full = visible_keys(sequence_length, None, None)
        return scores + (2.0 * indexer.heads * indexer.head_dim * full if indexer else 0.0)
    if isinstance(mixer, Recurrence):
        return 6.0 * mixer.inner * mixer.state
    return 0.0


def visible_keys(sequence_length: int, window: int | None, chunk: int | None, *, causal: bool = True) -> float:
    """Mean number of keys a query sees in a sequence, its own included; a window looks back alone."""
    span = min(sequence_length, chunk or sequence_length)
    if not causal and window is None:
        return float(span)
    reach = min(span, window or span)
    return (reach * (reach + 1) / 2 + (span - reach) * reach) / span
