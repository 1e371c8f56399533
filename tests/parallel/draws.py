"""Draws: designs over all dimensions of a plan at once, as small values that print, shrink and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

from meshwright.schedule import planned
from meshwright.search import Scope, check
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import Problem
from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.optimizer import (
    Adafactor,
    Moments,
    Muon,
    Optimizer,
    OptimizerKind,
    OptimizerSpec,
    ParameterGroup,
    Sgd,
)
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Dispatch,
    ExpertGrid,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
    TensorGrid,
    Training,
)
from meshwright.spec.synchronize import GradientSync
from tests.parallel.parity_cases import Masks, data_of
from tests.support import models
from tests.support.designs import LINK, SEQUENCE, cluster

OPTIMIZERS = {"adamw": OptimizerSpec, "muon": Muon, "sgd": Sgd}
PLAIN_SGD = "sgd without momentum"
# Adafactor's first step divides a gradient by its own size, and some of these gradients are rounding alone: not below
# this.
ADAFACTOR = "adafactor"
_SQUARED = 1e-8
# What is different for some parameters: the rate, the decay, or the kind.
GROUPS = {
    "none": (),
    "rates": (
        ParameterGroup(names=("layers.0.*", "head.*norm*"), learning_rate_factor=0.1),
        ParameterGroup(names=("layers.*.mixer.*",), learning_rate_factor=0.5, weight_decay=0.2),
    ),
    "decays": (
        ParameterGroup(names=("head.*",), weight_decay=0.3),
        ParameterGroup(names=("embedding.*", "*norm.*"), learning_rate_factor=2.0, weight_decay=0.05),
    ),
    "some adamw": (ParameterGroup(names=("layers.*.mixer.*", "head.*"), kind=OptimizerKind.ADAMW),),
    "some muon": (ParameterGroup(names=("layers.*.transform.*",), kind=OptimizerKind.MUON, learning_rate_factor=0.5),),
    "some sgd": (ParameterGroup(names=("layers.*.transform.*", "head.*"), kind=OptimizerKind.SGD, weight_decay=0.1),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One design of a tiny model. Defaults are the simplest; a draw shrinks towards them.

    `axes` are sizes of more than one from the outermost inwards, `bounds` the first block of every stage but the
    first, `recompute` the kind of each layer, `shards` the sharding of each block where they are sharded in unlike
    ways, `extents` over how many ranks where some are over other ones than the shard axis' (0), `frozen` the blocks
    that are, `exchange` and `experts` the fields of
    Exchange and ExpertGrid in order, `table` the rows of a schedule that is one, `routing` one of models.ROUTINGS or
    the model's own, `kv_heads` likewise, of which 0 is the model's own. There are as many `microbatches` as it says but
    for `fewer` of them. `gradients` travel whole or in another precision. `kinds` are the layers, of models.LAYERS,
    where they are not the model's, and `offloads` what of each block lies in the host's memory where that is unlike.
    `groups` is one of GROUPS, `steps` how many are taken.
    """

    model: str = "tiny"
    layers: int = 1
    axes: tuple[tuple[str, int], ...] = ()
    bounds: tuple[int, ...] = ()
    schedule: str = "1f1b"
    chunks: int = 1
    slices: int = 1
    microbatch: int = 1
    microbatches: int = 1
    sharding: str = "none"
    sequence_parallel: bool = False
    recompute: tuple[str, ...] = ("none",)
    frozen: tuple[int, ...] = ()
    exchange: tuple[str, int, str] = ("ring", 1, "zigzag")
    experts: tuple[int, int, str] | None = None
    precision: str = "fp64"
    documents: str = "one"
    masks: str = "none"
    prefix: bool = False
    factored: bool = False
    optimizer: str = "adamw"
    z_loss: float = 0.0
    clip_norm: float | None = None
    table: tuple[str, ...] = ()
    routing: str = "own"
    tensor_grid: str = "line"
    offload: str = "none"
    shards: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()
    vocab: int = models.VOCAB
    kv_heads: int = 0
    fewer: int = 0
    moments: str = "fp32"
    gradients: str = "whole"
    kinds: tuple[str, ...] = ()
    tied: bool = False
    positions: bool = False
    length: int = SEQUENCE
    groups: str = "none"
    empty_rows: int = 0
    placement: tuple[int, ...] = ()
    offloads: tuple[str, ...] = ()
    steps: int = 1

    @property
    def has_mixtures(self) -> bool:
        """Some layer is a mixture of experts."""
        return any("mixture" in kind for kind in self.kinds) if self.kinds else self.model in MIXTURES

    def size(self, axis: AxisName) -> int:
        return dict(self.axes).get(axis.value, 1)

    @property
    def ranks(self) -> int:
        product = 1
        for _, size in self.axes:
            product *= size
        return product

    def __str__(self) -> str:
        """What differs from the simplest, as JSON that `read` reads."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({name: value for name, value in told.items() if value != getattr(_SIMPLEST, name)})


_SIMPLEST = Draw()
_TUPLES = frozenset(field.name for field in fields(Draw) if isinstance(getattr(_SIMPLEST, field.name), tuple))


def read(text: str) -> Draw:
    """The draw that `str` wrote."""
    told: dict[str, Any] = json.loads(text)
    for key in {*_TUPLES, "experts"} & told.keys():
        told[key] = tuple(told[key])
    told["axes"] = tuple((name, size) for name, size in told.get("axes", ()))
    return Draw(**told)


def build(draw: Draw) -> Design:
    """The design of a draw, legal or not."""
    model, schedule = _whole_model(draw), scheduled(draw)
    edges = (0, *draw.bounds, len(model.blocks))
    places = planned.placement(schedule, pipeline=draw.size(AxisName.PIPELINE))
    plan = Plan(
        model=model.name,
        cluster="here",
        axes=tuple(Axis(name=AxisName(name), size=size) for name, size in draw.axes),
        stages=tuple(
            Stage(rank=rank, groups=tuple(_groups(draw, start, stop)))
            for rank, (start, stop) in zip(places, pairwise(edges), strict=True)
        ),
        schedule=schedule,
        sequence_length=draw.length,
        microbatch=draw.microbatch,
        exchange=_exchange(draw),
        experts=_experts(draw),
        tensor_grid=TensorGrid(draw.tensor_grid),
        gradients=GradientSync() if draw.gradients == "whole" else GradientSync(precision=Precision(draw.gradients)),
        placement=draw.placement or None,
        empty_rows=draw.empty_rows,
    )
    job = JobSpec(
        sequence_length=draw.length,
        batch_tokens=plan.read_tokens,
        total_tokens=100 * plan.read_tokens,
        precision=Precision(draw.precision),
        data=data_of(Masks(draw.masks)),
        optimizer=_optimizer(draw),
        z_loss=draw.z_loss,
    )
    return Design(model=model, cluster=_processors(draw.ranks), job=job, plan=plan)


def _whole_model(draw: Draw) -> ModelSpec:
    model = _model(draw.model, draw.layers)
    if draw.kinds:
        model = replace(model, layers=tuple(models.LAYERS[kind] for kind in draw.kinds))
    model = models.with_prefix(model) if draw.prefix else model
    model = models.with_kv_heads(model, draw.kv_heads) if draw.kv_heads else model
    model = models.factored(model) if draw.factored else model
    model = model if draw.routing == "own" else models.routed(model, models.ROUTINGS[draw.routing])
    model = replace(model, head=replace(model.head, tied=True)) if draw.tied else model
    model = replace(model, embedding=replace(model.embedding, positions=64)) if draw.positions else model
    return models.with_vocab(model, draw.vocab)


def _optimizer(draw: Draw) -> Optimizer:
    rate, clip_norm, groups = 1e-2, draw.clip_norm, GROUPS[draw.groups]
    if draw.optimizer == ADAFACTOR:
        return Adafactor(learning_rate=rate, clip_norm=clip_norm, groups=groups, epsilon_squared=_SQUARED)
    if draw.optimizer == PLAIN_SGD:
        return Sgd(learning_rate=rate, clip_norm=clip_norm, groups=groups, momentum=0.0)
    if draw.moments != Moments.FP32.value:
        return OptimizerSpec(learning_rate=rate, clip_norm=clip_norm, groups=groups, state=Moments(draw.moments))
    return OPTIMIZERS[draw.optimizer](learning_rate=rate, clip_norm=clip_norm, groups=groups)


def scheduled(draw: Draw) -> Schedule:
    return Schedule(
        kind=ScheduleKind(draw.schedule),
        microbatches=draw.microbatches - draw.fewer,
        chunks=draw.chunks,
        slices=draw.slices,
        table=draw.table,
    )


def _exchange(draw: Draw) -> Exchange:
    kind, inner, layout = draw.exchange
    return Exchange(kind=ExchangeKind(kind), inner=inner, layout=TokenLayout(layout))


def _experts(draw: Draw) -> ExpertGrid | None:
    if draw.experts is None:
        return None
    expert, tensor, dispatch = draw.experts
    return ExpertGrid(expert=expert, tensor=tensor, dispatch=Dispatch(dispatch))


def _groups(draw: Draw, start: int, stop: int) -> Iterator[BlockGroup]:
    """Runs of blocks [start, stop) of one recompute, sharding and offload, all frozen or none; what is not a layer has
    no recompute."""
    recompute = ("none", *draw.recompute, "none")
    shards = draw.shards or (draw.sharding,) * len(recompute)
    extents = draw.extents or (0,) * len(recompute)
    offloads = draw.offloads or (draw.offload,) * len(recompute)
    frozen = [block in draw.frozen for block in range(len(recompute))]
    kinds = list(zip(recompute, shards, extents, offloads, frozen, strict=True))
    edges = [start, *(block for block in range(start + 1, stop) if kinds[block] != kinds[block - 1]), stop]
    for first, last in pairwise(edges):
        yield BlockGroup(
            start=first,
            stop=last,
            tensor=draw.size(AxisName.TENSOR),
            sequence_parallel=draw.sequence_parallel,
            sharding=Sharding(shards[first]),
            shards=extents[first] or None,
            recompute=Recompute(recompute[first]),
            offload=Offload(offloads[first]),
            training=Training.FROZEN if first in draw.frozen else Training.ALL,
            precision=Precision(draw.precision),
        )


UNLIKE = "unlike"
KINDS = (*models.all_models(), UNLIKE)
MIXTURES = (*(name for name in models.all_models() if "mixture" in name), UNLIKE)


@cache
def _model(kind: str, layers: int) -> ModelSpec:
    """One of the models of every kind with so many layers; `unlike` is one whose layers all differ."""
    if kind != UNLIKE:
        whole = models.all_models()[kind]
        return replace(whole, layers=(whole.layers[0],) * layers)
    cycle = (
        Layer(mixer=models.attention(), transform=models.feed_forward()),
        Layer(mixer=models.attention(window=5), transform=models.mixture()),
        Layer(mixer=models.latent(), transform=models.feed_forward(hidden=48)),
        Layer(mixer=models.attention(sinks=True), transform=None),
    )
    return replace(models.model(UNLIKE), layers=tuple(cycle[index % len(cycle)] for index in range(layers)))


@cache
def _processors(ranks: int) -> ClusterSpec:
    machines = cluster(ranks)
    group = machines.groups[0]
    known = (Precision.FP64, Precision.FP32, Precision.BF16, *(kind for kind in Precision if kind.quantized))
    device = replace(group.device, peak_flops=dict.fromkeys(known, 1e9))
    return replace(machines, groups=(replace(group, device=device, host=LINK),))


def refused(draw: Draw) -> tuple[Problem, ...]:
    """What the rules of plans and of the runtime find in a draw; the tiny models fit anywhere."""
    return check(build(draw), scopes=frozenset({Scope.PLAN, Scope.RUNTIME}))
