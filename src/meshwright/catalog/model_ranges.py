"""Which models are possible: every size counts something, and blocks that meet are of one width."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.catalog.figures import brief, figure_problems, numbers
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import (
    Attention,
    Choice,
    LatentAttention,
    Layer,
    Mixture,
    ModelSpec,
    Score,
    Weighing,
    attends,
)
from meshwright.spec.ranks import rank_problems

MOST = 10**12  # of anything that a model counts
MOST_LAYERS = 4096  # four times those of the deepest published (2203.00555); stages are balanced in its square
MOST_EXPERTS = 2**20  # of all layers: fifty times those of Kimi-K2; each has tensors of its own in a checkpoint
_MAY_BE_ZERO = frozenset(
    {"extra_parameters", "positions", "parameters", "initializer_range", "scale", "low_frequency", "high_frequency"}
    | {"bias_rate", "balance_loss", "prefix"}
)
_WHERE = "layers"


def checked_model(model: ModelSpec) -> ModelSpec:
    """The model itself. Raises ConfigError with every number in it that no model has."""
    if problems := tuple(model_problems(model)):
        raise ConfigError(problems)
    return model


def model_problems(model: ModelSpec, where: str = "") -> Iterator[Problem]:
    """Numbers that no model has, by their paths under `where`; shapes are looked at where each number is possible."""
    found = [*figure_problems(model, where), *_counts(model, where)]
    dot = f"{where}." if where else ""
    if not model.layers:
        found.append(Problem(what="is empty", where=f"{dot}layers", fix="give at least one"))
    if len(model.layers) > MOST_LAYERS:
        found.append(too_deep(len(model.layers), f"{dot}layers"))
    experts = sum(layer.transform.experts for layer in model.layers if isinstance(layer.transform, Mixture))
    if experts > MOST_EXPERTS:
        what = f"{brief(experts)} experts in all layers are more than a plan is made for"
        found.append(Problem(what=what, where=f"{dot}layers", fix=f"choose {MOST_EXPERTS:,} or less"))
    yield from found or _shapes(model, dot)


def too_deep(layers: int, where: str) -> Problem:
    """The problem of more layers than a plan is made for."""
    fix = f"choose {MOST_LAYERS:,} or less"
    return Problem(what=f"{layers:,} are more layers than a plan is made for", where=where, fix=fix)


def _counts(model: ModelSpec, where: str) -> Iterator[Problem]:
    for path, number in numbers(model, where):
        if number == 0 and path.rpartition(".")[2] not in _MAY_BE_ZERO:
            yield Problem(what="0 is not a positive number", where=path)
        elif number > MOST:
            what = f"{brief(number)} is more than any model has"
            yield Problem(what=what, where=path, fix=f"choose {MOST:,} or less")


def _shapes(model: ModelSpec, dot: str) -> Iterator[Problem]:
    width, vocab = model.width, model.vocab
    if model.head.width != width:
        yield Problem(what=f"{model.head.width} is not the width of the model, {width}", where=f"{dot}head.width")
    if model.head.vocab != vocab:
        yield Problem(what=f"{model.head.vocab} is not the vocabulary, {vocab}", where=f"{dot}head.vocab")
    shares = sorted({mixer.prefix for layer in model.layers if (mixer := attends(layer)) and mixer.prefix})
    if len(shares) > 1:
        what = f"prompts that fill {shares[0]:g} of a sequence in one layer and {shares[-1]:g} in another"
        yield Problem(what=what, where=f"{dot}{_WHERE}", fix="give every layer one prefix, or 0 where it is causal")
    told: set[Layer] = set()
    for index, layer in enumerate(model.layers):
        if layer not in told:
            told.add(layer)
            yield from _layer_shapes(layer, f"{dot}{_WHERE}[{index}]", width=width)


def _layer_shapes(layer: Layer, where: str, *, width: int) -> Iterator[Problem]:
    """Of one layer; of layers that are alike the first is told."""
    mixer, transform, mixes = layer.mixer, layer.transform, isinstance(layer.transform, Mixture)
    parts = {"mixer": mixer, "dense": layer.dense, "transform": transform, "sum_norm": layer.sum_norm}
    if isinstance(transform, Mixture):
        parts |= {"transform.router_norm": transform.router_norm, "transform.expert_norm": transform.expert_norm}
    for name, part in parts.items():
        if part is not None and part.width != width:
            what = f"{part.width} is not the width of the model, {width}"
            yield Problem(what=what, where=f"{where}.{name}.width")
    yield from rank_problems(layer.ranks, layer.places, f"{where}.ranks")
    if layer.dense is not None and not mixes:
        yield Problem(what="a dense branch goes beside a mixture", where=f"{where}.dense", fix="leave it out")
    if layer.sum_norm is not None and layer.dense is None:
        what = "a norm of a sum needs a dense branch beside the transform"
        yield Problem(what=what, where=f"{where}.sum_norm", fix="use the transform's post_norm")
    if (attention := attends(layer)) is not None and attention.prefix:
        yield from _prefix(attention, f"{where}.mixer.prefix")
    if isinstance(mixer, Attention):
        if mixer.heads % mixer.kv_heads:
            what = f"{mixer.kv_heads} does not divide {mixer.heads} heads"
            yield Problem(what=what, where=f"{where}.mixer.kv_heads")
        dims = mixer.rotary.dims if mixer.rotary else 0
        if dims % 2 or dims > mixer.head_dim:
            what = f"{dims} is not an even number up to the {mixer.head_dim} of a head"
            yield Problem(what=what, where=f"{where}.mixer.rotary.dims")
        planes = mixer.rotary.planes if mixer.rotary else None
        if planes is not None and planes > dims // 2:
            what = f"{planes} is more than the {dims // 2} planes of {dims} features"
            yield Problem(what=what, where=f"{where}.mixer.rotary.planes")
    if isinstance(transform, Mixture) and transform.top_k > transform.experts:
        what = f"{transform.top_k} is more than {transform.experts} experts"
        yield Problem(what=what, where=f"{where}.transform.top_k")
    elif isinstance(transform, Mixture):
        yield from _routing(transform, f"{where}.transform.routing")


def _prefix(mixer: Attention | LatentAttention, where: str) -> Iterator[Problem]:
    """A prefix mask is a causal one but for a part of each sequence."""
    if mixer.prefix > 1.0:
        yield Problem(what=f"{mixer.prefix:g} is not a share of a sequence", where=where, fix="choose 0 to 1")
    if isinstance(mixer, Attention) and not mixer.causal:
        yield Problem(what="attention that is not causal sees all of the prompt already", where=where, fix="choose 0")
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
        yield Problem(what="the indexer of sparse attention looks back alone", where=where, fix="choose 0")


def _routing(part: Mixture, where: str) -> Iterator[Problem]:
    """Groups of experts are equal and hold enough to choose from."""
    how = part.routing
    if part.experts % how.groups:
        yield Problem(what=f"{how.groups} does not divide {part.experts} experts", where=f"{where}.groups")
    elif not how.chosen_groups <= how.groups:
        what = f"{how.chosen_groups} is more than {how.groups} groups"
        yield Problem(what=what, where=f"{where}.chosen_groups")
    elif how.groups > 1 and how.chosen_groups * (part.experts // how.groups) < part.top_k:
        what = f"{how.chosen_groups} groups of {part.experts // how.groups} have fewer than {part.top_k} experts"
        yield Problem(what=what, where=f"{where}.chosen_groups")
    if how.choice is Choice.PROTOTYPES:
        if part.experts % part.top_k:
            what = f"{part.top_k} prototypes do not divide {part.experts} experts"
            yield Problem(what=what, where=f"{where}.choice")
        if how.groups > 1:
            yield Problem(what="prototypes are groups already", where=f"{where}.groups", fix="choose 1")
        if how.score is not Score.SOFTMAX or how.weighing is not Weighing.NORMALIZED:
            what = "every prototype weighs by a softmax of its own"
            yield Problem(what=what, where=f"{where}.choice", fix="leave score and weighing out")
