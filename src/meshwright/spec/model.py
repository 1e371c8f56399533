"""ModelSpec: a model as blocks in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

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
    MatrixRank,
    Mixer,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
    Transform,
)
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.positions import Rotary, RotaryScaling, Temperature
from meshwright.spec.ranks import rank_problems
from meshwright.spec.routing import Choice, Routing, Score, Weighing

B = TypeVar("B")
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
    "MatrixRank",
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
    "Temperature",
    "Tower",
    "Transform",
    "Weighing",
    "attends",
    "language_model",
    "prefix_tokens",
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
    def kv_heads(self) -> tuple[int, ...]:
        """Distinct numbers of key-value heads of its mixers, ascending."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(sorted({mixer.kv_heads for mixer in mixers if isinstance(mixer, Attention)}))

    @property
    def parameters(self) -> int:
        """Every parameter of the real module, tied ones once."""
        blocks = sum(count * block.parameters for block, count in _runs(self.blocks))
        return blocks + sum(tower.parameters for tower in self.towers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: a mixture counts only the experts it chooses."""
        return self.parameters - sum(layer.parameters - layer.active_parameters for layer in self.layers)

    @property
    def layer_kinds(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers and how many there are of each, in order of first appearance."""
        return tuple(Counter(self.layers).items())

    @property
    def prefix(self) -> float:
        """The share of a sequence that prefix masks are taken to cover; 0 where no layer has one."""
        return max((mixer.prefix for layer, _ in _runs(self.layers) if (mixer := attends(layer))), default=0.0)

    def causal(self) -> ModelSpec:
        """The model of the same tensors without prefix masks."""
        return replace(self, layers=tuple(_causal(layer) for layer in self.layers)) if self.prefix else self

    def with_ranks(self, ranks: Mapping[int, Sequence[MatrixRank]]) -> ModelSpec:
        """The model whose block `index` (layers are 1 to L) has the ranks that `ranks` gives it; others keep theirs.

        Raises ConfigError where a block is no layer, or has no such matrix of such a rank.
        """
        problems, layers = [], list(self.layers)
        for index, given in ranks.items():
            if not 1 <= index <= len(layers):
                fix = f"choose 1 to {len(layers)}"
                problems.append(Problem(what=f"block {index} is no layer", where="ranks", fix=fix))
                continue
            layer = replace(layers[index - 1], ranks=tuple(sorted(given)))
            problems += rank_problems(layer.ranks, layer.places, f"layers[{index - 1}].ranks")
            layers[index - 1] = layer
        if problems:
            raise ConfigError(problems)
        alike: dict[Layer, Layer] = {}
        return replace(self, layers=tuple(alike.setdefault(layer, layer) for layer in layers))

    @property
    def dense_within(self) -> int | None:
        """The positions up to which dense attention stands for a sparse one; None where it stands for none."""
        mixers = [layer.mixer for layer, _ in self.layer_kinds if isinstance(layer.mixer, LatentAttention)]
        return min((mixer.dense_within for mixer in mixers if mixer.dense_within), default=None)

    @property
    def most_positions(self) -> int:
        """The longest sequence that the model reads."""
        return min(self.max_positions, self.dense_within or self.max_positions)

    def beyond_positions(self, length: int) -> str:
        """That sequences of `length` tokens are longer than the model was made for; nothing where they are not."""
        if length <= self.max_positions:
            return ""
        return (
            f"sequences of {length:,} tokens are longer than the {self.max_positions:,} positions that {self.name} is "
            "made for: it is to learn the others from this text, or its rotary angles are to be scaled"
        )

    def dense(self) -> ModelSpec:
        """The model of whole matrices."""
        if not any(layer.ranks for layer in self.layers):
            return self
        return self.with_ranks(dict.fromkeys(range(1, len(self.layers) + 1), ()))

    def flops_per_token(self, sequence_length: int, *, frozen: frozenset[int] = frozenset()) -> float:
        """Model FLOPs to train on one token: the one formula behind every MFU this system prints.

        Six per parameter in a matrix product (head included, embedding look-up not) and twelve per head feature and
        visible key, counting only keys that the mask shows: recompute never counts (PaLM, 2204.02311, appendix B,
        with the causal mask). Of `frozen` blocks a parameter counts four, and neither it nor scores count backward
        where no other block comes before.
        """
        matrices = sum(count * block.tokens * block.matrix_products for block, count in _runs(self.blocks))
        whole = 6.0 * matrices + 3.0 * self.score_flops_per_token(sequence_length)
        if not frozen:
            return whole
        first = min(set(range(len(self.blocks))) - frozen, default=len(self.blocks))
        left_out = 2.0 * sum(self.blocks[index].tokens * self.blocks[index].matrix_products for index in frozen)
        for block in self.blocks[:first]:
            left_out += 2.0 * block.tokens * block.matrix_products
            left_out += 2.0 * self._scores(block, sequence_length) if isinstance(block, Layer) else 0.0
        return whole - left_out

    def score_flops_per_token(self, sequence_length: int) -> float:
        """Forward FLOPs of queries by keys and scores by values over all layers, per token of the job's sequences."""

        return sum(count * self._scores(layer, sequence_length) for layer, count in _runs(self.layers))

    def _scores(self, layer: Layer, sequence_length: int) -> float:
        return layer.tokens * score_flops_per_token(layer, max(1, round(layer.tokens * sequence_length)))


def language_model(model: ModelSpec) -> ModelSpec:
    """What of a model is trained here: its decoder without towers, and dense attention in place of a sparse one that
    reads so few keys that it is the same up to `dense_within` positions."""
    made: dict[Layer, Layer] = {}
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentAttention) and mixer.indexer:
            made[layer] = replace(layer, mixer=replace(mixer, indexer=None, dense_within=mixer.indexer.top_k))
    return replace(model, towers=(), layers=tuple(made.get(layer, layer) for layer in model.layers))


def _runs(blocks: Sequence[B]) -> Iterator[tuple[B, int]]:
    """Neighbouring blocks that are one and the same, counted: what takes long to add up is asked of each once."""
    for _, run in groupby(blocks, key=id):
        first, *others = run
        yield first, 1 + len(others)


def score_flops_per_token(layer: Layer, sequence_length: int) -> float:
    """Forward FLOPs per token of queries by keys and scores by values, over the keys the mask shows.

    `sequence_length` tokens of the layer's own.
    """
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        prefix = prefix_tokens(sequence_length, mixer.prefix)
        span = visible_keys(sequence_length, mixer.window, mixer.chunk, causal=mixer.causal, prefix=prefix)
        return 4.0 * mixer.heads * mixer.head_dim * span * mixer.keys
    if isinstance(mixer, LatentAttention):
        limit = mixer.indexer.top_k if mixer.indexer else mixer.window
        span = visible_keys(sequence_length, limit, None, prefix=prefix_tokens(sequence_length, mixer.prefix))
        scores = 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim) * span
        indexer = mixer.indexer
        full = visible_keys(sequence_length, None, None)
        return scores + (2.0 * indexer.heads * indexer.head_dim * full if indexer else 0.0)
    if isinstance(mixer, Recurrence):
        return 6.0 * mixer.inner * mixer.state
    return 0.0


def attends(layer: Layer) -> Attention | LatentAttention | None:
    """The layer's attention; None where it has none."""
    return layer.mixer if isinstance(layer.mixer, Attention | LatentAttention) else None


def _causal(layer: Layer) -> Layer:
    mixer = attends(layer)
    return layer if mixer is None else replace(layer, mixer=replace(mixer, prefix=0.0))


def prefix_tokens(sequence_length: int, share: float) -> int:
    """How many of the first tokens of a sequence are its prefix, where that is `share` of it."""
    return min(sequence_length, round(share * sequence_length))


def visible_keys(
    sequence_length: int, window: int | None, chunk: int | None, *, causal: bool = True, prefix: int = 0
) -> float:
    """Mean number of keys a query sees in a sequence, its own included; a window looks back alone, but in the first
    `prefix` tokens, which see each other."""
    span = min(sequence_length, chunk or sequence_length)
    if not causal and window is None:
        return float(span)
    reach = min(span, window or span)
    back = (reach * (reach + 1) / 2 + (span - reach) * reach) / span
    pieces, rest = divmod(prefix, span)
    return back + (pieces * _later_keys(span, reach) + _later_keys(rest, reach)) / sequence_length


def _later_keys(prefix: int, reach: int) -> float:
    """Keys behind their own that the tokens of a prefix see, `reach` keys at most with their own; summed over them."""
    reach = min(reach, prefix)
    return reach * (reach - 1) / 2 + (prefix - reach) * (reach - 1)
