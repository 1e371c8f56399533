"""Decoder: any run of blocks of a model as one module, with the parameter names of the whole model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.attention import GroupedAttention
from meshwright.nn.context import Context, KnownAngles, SequenceShare
from meshwright.nn.feed_forward import DenseFeedForward
from meshwright.nn.latent import LatentAttentionMixer
from meshwright.nn.linear import Table
from meshwright.nn.low_rank import factor
from meshwright.nn.mixture import MixtureOfExperts
from meshwright.nn.norm import build_norm
from meshwright.nn.weights import Weighted
from meshwright.spec import model as spec_model
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import Activation, Attention, FeedForward, LatentAttention, Layer, Mixture, ModelSpec

GATED_ALONE = (Activation.CLAMPED_SWIGLU,)

Around = Callable[..., Tensor]


class Positions(Weighted):
    """Learned positions: row p is added to the token at position p."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, start: int, stop: int, at: Tensor | None = None) -> Tensor:
        """(stop - start, width), or the rows `at`, (..., width)."""
        table = self.read(self.weight)
        return table[start:stop] if at is None else functional.embedding(at, table)


class TokenEmbedding(nn.Module):
    """Tokens to hidden features; `positions` where the model learns them."""

    def __init__(self, spec: spec_model.Embedding, *, positions: bool) -> None:
        super().__init__()
        self.scale = spec.scale
        self.tokens = Table(spec.vocab, spec.width)
        self.positions = Positions(spec.positions, spec.width) if spec.positions and positions else None

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """(b, s, width) from int64 (b, s)."""
        x = self.tokens(tokens)
        x = x if self.scale == 1.0 else x * self.scale
        if self.positions is not None:
            x = x + self.positions(context.start, context.start + tokens.shape[1], context.positions)
        return x


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + transform(norm(x)); norms after the branches where the model has them.

    A dense branch beside the transform is added to what that gives, before the norm of their sum. `scale` (1,), by
    which what comes out is multiplied, is state of the run: no optimizer steps it.
    `around`, when set, runs the body: recompute puts a checkpoint there, inside whatever wraps the layer.
    """

    def __init__(self, spec: Layer) -> None:
        super().__init__()
        self.around: Around | None = None
        self.mixer = _build(spec.mixer)
        self.mixer_norm = build_norm(spec.mixer.norm) if spec.mixer else None
        self.mixer_post_norm = build_norm(spec.mixer.post_norm) if spec.mixer else None
        self.dense = DenseFeedForward(spec.dense) if spec.dense else None
        self.dense_norm = build_norm(spec.dense.norm) if spec.dense else None
        self.dense_post_norm = build_norm(spec.dense.post_norm) if spec.dense else None
        self.transform = _build(spec.transform)
        self.transform_norm = build_norm(spec.transform.norm) if spec.transform else None
        self.transform_post_norm = build_norm(spec.transform.post_norm) if spec.transform else None
        self.sum_norm = build_norm(spec.sum_norm)
        self.scale: Tensor | None
        self.register_buffer("scale", torch.ones(1) if spec.scaled else None)
        factor(self, spec.ranks)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.body(x, context) if self.around is None else self.around(self.body, x, context)
        if isinstance(self.transform, MixtureOfExperts):
            self.transform.tally()
        return x

    def body(self, x: Tensor, context: Context) -> Tensor:
        if self.mixer is not None:
            x = x + _branch(x, context, self.mixer_norm, self.mixer, self.mixer_post_norm)
        if self.transform is not None:
            x = x + self._changes(x, context, self.transform)
        return x if self.scale is None else x * self.scale.to(x.dtype)

    def _changes(self, x: Tensor, context: Context, transform: nn.Module) -> Tensor:
        """What the transform adds to x (b, s, width), with the branch beside it."""
        beside = None
        if self.dense is not None:
            beside = _branch(x, context, self.dense_norm, self.dense, self.dense_post_norm)
        made = _branch(x, context, self.transform_norm, transform, self.transform_post_norm)
        made = made if beside is None else beside + made
        return made if self.sum_norm is None else self.sum_norm(made)


class Projection(Weighted):
    """Hidden features to logits by a matrix of its own, or by the embedding's table when tied."""

    def __init__(self, spec: spec_model.Head) -> None:
        super().__init__()
        self.weight = None if spec.tied else nn.Parameter(torch.empty(spec.vocab, spec.width))
        self.bias = nn.Parameter(torch.empty(spec.vocab)) if spec.bias else None

    def forward(self, x: Tensor, tied: Table | None) -> Tensor:
        if self.weight is None:
            assert tied is not None, "a tied head is handed the table"
            weight = tied.read(tied.weight)
        else:
            weight = self.read(self.weight)
        return self.multiply(x, weight, None if self.bias is None else self.read(self.bias))


class OutputHead(nn.Module):
    """Final norm and the projection onto the vocabulary."""

    def __init__(self, spec: spec_model.Head) -> None:
        super().__init__()
        self.softcap = spec.softcap
        self.norm = build_norm(spec.norm)
        self.output = Projection(spec)

    def forward(self, x: Tensor, tied: Table | None) -> Tensor:
        """Logits (b, s, vocab) from hidden (b, s, width); `tied` is the embedding's table or None."""
        logits = self.output(x if self.norm is None else self.norm(x), tied)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Decoder(nn.Module):
    """Blocks [start, stop) of `model`: block 0 embeds, blocks 1 ... L are layers, block L + 1 is the head.

    Parameters are named as the whole model names them (`layers.7.mixer.query.weight`) and are not initialised. A
    tied head in a stage that does not embed holds its own copy of the table, under the table's name. Raises
    ConfigError naming every block that has no module.
    """

    def __init__(self, model: ModelSpec, *, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        last = len(model.layers) + 1
        stop = last + 1 if stop is None else stop
        problems = unsupported(model, start=start, stop=stop)
        if problems:
            raise ConfigError(problems)
        self.model, self.start, self.stop = model, start, stop
        self.known_angles: KnownAngles = {}
        self.share: SequenceShare | None = None  # set by a layout that divides sequences over ranks
        self.embeds, self.has_head = start == 0, stop == last + 1
        self.tied = self.has_head and model.head.tied
        table = self.embeds or self.tied
        self.embedding = TokenEmbedding(model.embedding, positions=self.embeds) if table else None
        blocks = range(max(start, 1), min(stop, last))
        self.layers = nn.ModuleDict({str(block - 1): DecoderLayer(model.layers[block - 1]) for block in blocks})
        self.head = OutputHead(model.head) if self.has_head else None

    @property
    def copied_table(self) -> str | None:
        """The name of the table that a tied head shares with the embedding, where one of the two is in this stage."""
        return "embedding.tokens.weight" if self.model.head.tied and self.embeds != self.has_head else None

    def forward(
        self,
        x: Tensor,
        *,
        documents: Tensor | None = None,
        ahead: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Hidden (b, s, width), or logits (b, s, vocab) when this holds the head.

        x is int64 tokens (b, s) when this embeds, else hidden (b, s, width). `documents` (b, s) keeps attention
        inside each document, and `ahead` (b, s) is how many later tokens each position sees where a mixer has a prefix
        mask; `context` replaces both when text is generated step by step. With a `share` x holds some tokens of each
        sequence, and `documents` and `ahead` are those of all.
        """
        if context is None:
            context = Context(documents=documents, ahead=ahead, known_angles=self.known_angles)
        if self.share is not None:
            context.positions, context.length = self.share.positions(context), self.share.length
        if self.embedding is not None and self.embeds:
            x = self.embedding(x, context)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.head is not None:
            x = self.head(x, self.embedding.tokens if self.tied and self.embedding is not None else None)
        return x


def unsupported(model: ModelSpec, *, start: int, stop: int) -> tuple[Problem, ...]:
    """What of blocks [start, stop) can be priced but not built."""
    problems, language = [], f"{model.name}:language is the model without"
    if start == 0 and model.towers:
        problems.append(Problem(what="encoder towers have no module", where=f"{model.name}.towers", fix=language))
    for index, layer in enumerate(model.layers):
        if not start <= index + 1 < stop:
            continue
        where = f"{model.name}.layers[{index}]"
        if layer.extra_parameters:
            problems.append(Problem(what="extra parameters of a layer have no module", where=where))
        if layer.tokens != 1.0:
            problems.append(Problem(what="layers of other tokens than the sequences' have no module", where=where))
        if isinstance(layer.mixer, spec_model.Recurrence):
            problems.append(Problem(what="recurrent mixers have no module", where=f"{where}.mixer"))
        if isinstance(layer.mixer, Attention) and not layer.mixer.causal:
            problems.append(Problem(what="attention that sees later tokens has no module", where=f"{where}.mixer"))
        if isinstance(layer.mixer, Attention) and layer.mixer.gated:
            problems.append(Problem(what="attention with a gate has no module", where=f"{where}.mixer"))
        if isinstance(layer.mixer, LatentAttention) and layer.mixer.indexer:
            what = "the indexer of sparse attention has no module"
            problems.append(Problem(what=what, where=f"{where}.mixer", fix=language))
        if layer.transform and layer.transform.activation in GATED_ALONE and not layer.transform.gated:
            what = f"{layer.transform.activation.value} without a gate has no module"
            problems.append(Problem(what=what, where=f"{where}.transform"))
        shared = layer.transform.shared if isinstance(layer.transform, Mixture) else None
        if shared is not None and (shared.norm or shared.post_norm):
            what = "norms of a shared branch have no module"
            problems.append(
                Problem(what=what, where=f"{where}.transform.shared", fix="make it the layer's dense branch")
            )
        if isinstance(layer.transform, Mixture) and layer.transform.extra_parameters:
            problems.append(Problem(what="extra parameters of a mixture have no module", where=f"{where}.transform"))
    return tuple(problems)


def _build(spec: spec_model.Mixer | spec_model.Transform | None) -> nn.Module | None:
    if isinstance(spec, Attention):
        return GroupedAttention(spec)
    if isinstance(spec, LatentAttention):
        return LatentAttentionMixer(spec)
    if isinstance(spec, FeedForward):
        return DenseFeedForward(spec)
    return MixtureOfExperts(spec) if isinstance(spec, Mixture) else None


def _branch(x: Tensor, context: Context, norm: nn.Module | None, body: nn.Module, post: nn.Module | None) -> Tensor:
    x = body(x if norm is None else norm(x), context)
    return x if post is None else post(x)
