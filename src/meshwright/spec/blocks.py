"""The kinds of block a model is made of; each counts its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.parts import (
    Activation,
    Attention,
    FeedForward,
    Indexer,
    LatentAttention,
    Mixer,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
    Transform,
)
from meshwright.spec.ranks import MatrixRank, taken_away

__all__ = [
    "Activation",
    "Attention",
    "Block",
    "Embedding",
    "FeedForward",
    "Head",
    "Indexer",
    "LatentAttention",
    "Layer",
    "MatrixRank",
    "Mixer",
    "Mixture",
    "Norm",
    "NormKind",
    "QueryKeyNorm",
    "Recurrence",
    "Transform",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Token embedding, and learned positions where `positions` > 0; `tokens` as in a Layer."""

    vocab: int
    width: int
    positions: int = 0
    scale: float = 1.0
    tokens: float = 1.0
    kind: str = "embedding"

    @property
    def parameters(self) -> int:
        return (self.vocab + self.positions) * self.width

    @property
    def matrix_parameters(self) -> int:
        return 0

    @property
    def matrix_products(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One residual layer: a token mixer and a feed-forward, either of which may be absent.

    `dense` is a branch beside a mixture of experts, with norms of its own (residual experts, 2201.05596): both read the
    same features, `sum_norm` norms the sum of what they give. With `scaled` what the layer gives is multiplied by a
    number that is stored beside the parameters and that no optimizer steps.

    It sees `tokens` times as many tokens as the job's sequences have: a decoder beside a longer encoder less than one.

    `ranks`, in the order of their names, says which matrices are products of two thin ones (Pufferfish, 2103.03936).
    """

    mixer: Mixer | None
    transform: Transform | None
    dense: FeedForward | None = None
    sum_norm: Norm | None = None
    scaled: bool = False
    extra_parameters: int = 0
    tokens: float = 1.0
    ranks: tuple[MatrixRank, ...] = ()
    kind: str = "layer"

    @property
    def parameters(self) -> int:
        norm = self.sum_norm.parameters if self.sum_norm else 0
        whole = sum(part.parameters for part in self.parts) + norm + self.extra_parameters
        return whole - (taken_away(self.ranks, self.places) if self.ranks else 0)

    @property
    def active_parameters(self) -> int:
        idle = (
            self.transform.parameters - self.transform.active_parameters if isinstance(self.transform, Mixture) else 0
        )
        return self.parameters - idle

    @property
    def matrix_parameters(self) -> int:
        whole = sum(part.matrix_parameters for part in self.parts)
        return whole - (taken_away(self.ranks, self.places) if self.ranks else 0)

    @property
    def matrix_products(self) -> float:
        """Parameters that one of its tokens multiplies."""
        dropped = self.transform.dropped_products if isinstance(self.transform, Mixture) else 0.0
        if not isinstance(self.mixer, Attention):
            return self.matrix_parameters - dropped
        attends = self.mixer.matrix_products - self.mixer.matrix_parameters
        if self.ranks:
            key_values = tuple(each for each in self.ranks if each.name in ("mixer.key", "mixer.value"))
            attends -= (self.mixer.keys - 1.0) * taken_away(key_values, self.places)
        return self.matrix_parameters + attends - dropped

    @property
    def places(self) -> dict[str, Mixer | Transform]:
        """Its parts by the names that its parameters begin with, in the order of their work."""
        found = {"mixer": self.mixer, "dense": self.dense, "transform": self.transform}
        return {place: part for place, part in found.items() if part is not None}

    @property
    def parts(self) -> tuple[Mixer | Transform, ...]:
        """In the order of their work."""
        return tuple(part for part in (self.mixer, self.dense, self.transform) if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Final norm and the projection onto the vocabulary; a tied head reuses the embedding's matrix.

    `tokens` as in a Layer.
    """

    vocab: int
    width: int
    norm: Norm | None
    tied: bool = False
    bias: bool = False
    softcap: float | None = None
    tokens: float = 1.0
    kind: str = "head"

    @property
    def matrix_parameters(self) -> int:
        return self.vocab * self.width

    @property
    def matrix_products(self) -> float:
        return self.matrix_parameters

    @property
    def parameters(self) -> int:
        own = (0 if self.tied else self.matrix_parameters) + (self.vocab if self.bias else 0)
        return own + (self.norm.parameters if self.norm else 0)


Block = Embedding | Layer | Head
