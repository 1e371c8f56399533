"""Draws: designs over all dimensions of a plan at once, as small values that print, shrink and come back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from meshwright.schedule import planned
from meshwright.schedule.build import LOOPS, NAMED, SLICED, V_SHAPES
from meshwright.schedule.synthesize import synthesize
from meshwright.schedule.workload import Workload
from meshwright.search import Scope, check
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import Problem
from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.optimizer import Muon, OptimizerSpec, Sgd
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Dispatch,
    ExpertGrid,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
    Training,
)
from tests.parallel.parity_cases import Documents, Masks, data_of
from tests.support import models
from tests.support.designs import SEQUENCE, cluster

RANKS = (1, 2, 2, 3, 4, 4, 4, 4, 6, 8, 8, 8, 8)
MOST_SEQUENCES = 16
# Not Adafactor: its first step divides a gradient by itself, and some of these gradients are rounding alone.
OPTIMIZERS = {"adamw": OptimizerSpec, "muon": Muon, "sgd": Sgd}
MOST_LAYERS = 8
TRIES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One design of a tiny model. Defaults are the simplest; a draw shrinks towards them.

    `axes` are sizes of more than one from the outermost inwards, `bounds` the first block of every stage but the
    first, `recompute` the kind of each layer, `frozen` the blocks that are, `exchange` and `experts` the fields of
    Exchange and ExpertGrid in order, `table` the rows of a schedule that is one.
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
        plain = asdict(Draw())
        return json.dumps({key: value for key, value in asdict(self).items() if value != plain[key]})


def read(text: str) -> Draw:
    """The draw that `str` wrote."""
    told: dict[str, Any] = json.loads(text)
    for key in {"bounds", "recompute", "frozen", "exchange", "experts", "table"} & told.keys():
        told[key] = tuple(told[key])
    told["axes"] = tuple((name, size) for name, size in told.get("axes", ()))
    return Draw(**told)


def build(draw: Draw) -> Design:
    """The design of a draw, legal or not."""
    model, schedule = _model(draw.model, draw.layers), scheduled(draw)
    model = models.with_prefix(model) if draw.prefix else model
    model = models.factored(model) if draw.factored else model
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
        sequence_length=SEQUENCE,
        microbatch=draw.microbatch,
        exchange=_exchange(draw),
        experts=_experts(draw),
    )
    job = JobSpec(
        sequence_length=SEQUENCE,
        batch_tokens=plan.batch_tokens,
        total_tokens=100 * plan.batch_tokens,
        precision=Precision(draw.precision),
        data=data_of(Masks(draw.masks)),
        optimizer=OPTIMIZERS[draw.optimizer](learning_rate=1e-2, clip_norm=draw.clip_norm),
        z_loss=draw.z_loss,
    )
    return Design(model=model, cluster=_processors(draw.ranks), job=job, plan=plan)


def scheduled(draw: Draw) -> Schedule:
    return Schedule(
        kind=ScheduleKind(draw.schedule),
        microbatches=draw.microbatches,
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
    """Runs of blocks [start, stop) of one recompute, all frozen or none; what is not a layer has no recompute."""
    recompute = ("none", *draw.recompute, "none")
    kinds = [(kind, block in draw.frozen) for block, kind in enumerate(recompute)]
    edges = [start, *(block for block in range(start + 1, stop) if kinds[block] != kinds[block - 1]), stop]
    for first, last in pairwise(edges):
        yield BlockGroup(
            start=first,
            stop=last,
            tensor=draw.size(AxisName.TENSOR),
            sequence_parallel=draw.sequence_parallel,
            sharding=Sharding(draw.sharding),
            recompute=Recompute(recompute[first]),
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
    device = replace(group.device, peak_flops=dict.fromkeys((Precision.FP64, Precision.FP32, Precision.BF16), 1e9))
    return replace(machines, groups=(replace(group, device=device),))


def refused(draw: Draw) -> tuple[Problem, ...]:
    """What the rules of plans and of the runtime find in a draw; the tiny models fit anywhere."""
    return check(build(draw), scopes=frozenset({Scope.PLAN, Scope.RUNTIME}))


def legal(count: int, *, seed: int) -> list[Draw]:
    """`count` different draws that no rule refuses, the same for the same seed, ordered by ranks.

    Axes and a schedule are drawn first and the rest anew until it is legal, so that no rule makes them rare.
    """
    random, found = Random(seed), dict[Draw, None]()
    while len(found) < count:
        axes = _axes(random)
        kind, chunks = _schedule(random, dict(axes).get("pipeline", 1))
        tries = (_any(random, axes, kind, chunks) for _ in range(TRIES))
        one = next((one for one in tries if one is not None and is_whole(one) and not refused(one)), None)
        if one is not None:
            one = _tabled(replace(one, masks=_masks(one), prefix=_prefix(one), slices=_slices_shared(one)))
            found[replace(one, factored=_factored(one))] = None
    return sorted(found, key=lambda draw: draw.ranks)


def is_whole(draw: Draw) -> bool:
    """Not in slices that context ranks share: those are of `_sliced`."""
    return draw.slices == 1 or draw.size(AxisName.CONTEXT) == 1


def _slices_shared(draw: Draw) -> int:
    """Two where the context ranks of a causal draw may share them."""
    shares = draw.size(AxisName.CONTEXT) > 1 and ScheduleKind(draw.schedule) in SLICED and not _prefix(draw)
    return 2 if shares and not refused(replace(draw, slices=2)) else draw.slices


def _masks(draw: Draw) -> str:
    """Of half of the draws; by the draw alone, so that the others stay what they were before there were masks."""
    return Random(str(draw)).choice((Masks.NONE, Masks.NONE, Masks.SOME, Masks.HALVES)).value


def _tabled(draw: Draw) -> Draw:
    """Of one in four pipelines a schedule made for uneven stages, some with whole backwards; by the draw alone."""
    random, stages = Random(f"table {draw}"), len(draw.bounds) + 1
    if draw.size(AxisName.PIPELINE) == 1 or draw.slices > 1 or random.random() > 1 / 4:
        return draw
    passes = [tuple(random.choice((0.5, 1.0, 2.0)) for _ in range(stages)) for _ in range(3)]
    work = Workload(
        forward=passes[0],
        input=passes[1],
        weight=passes[2],
        transfer=(0.1,) * stages,
        placement=planned.placement(scheduled(draw), pipeline=draw.size(AxisName.PIPELINE)),
        microbatches=draw.microbatches,
        activation_bytes=(1.0,) * stages,
        limit_bytes=(random.choice((float(draw.chunks), 2.0 * draw.chunks, math.inf)),) * draw.size(AxisName.PIPELINE),
    )
    made = synthesize(work, tries=40, seed=random.randrange(100)).program
    entry = planned.of(random.choice((made, made.whole())), chunks=draw.chunks)
    return replace(draw, schedule=entry.kind.value, table=entry.table)


def _prefix(draw: Draw) -> bool:
    """Of a third of those whose sequences are whole, by the draw alone as well."""
    return draw.slices == 1 and Random(f"prefix {draw}").random() < 1 / 3


def _factored(draw: Draw) -> bool:
    """Of a quarter, by the draw alone."""
    return Random(f"factored {draw}").random() < 1 / 4


def _any(random: Random, axes: tuple[tuple[str, int], ...], kind: ScheduleKind, chunks: int) -> Draw | None:
    """A draw of every other dimension; None where the batch is too large for a test or the layers too few."""
    sizes = dict(axes)
    pipeline = sizes.get("pipeline", 1)
    layers = random.randint(1, MOST_LAYERS)
    microbatch, microbatches = random.choice((1, 1, 2)), random.randint(1, 8)
    data = sizes.get("replicate", 1) * sizes.get("shard", 1)
    if data * microbatch * microbatches > MOST_SEQUENCES or pipeline * chunks > layers + 2:
        return None
    shared = sizes.get("shard", 1) * sizes.get("context", 1) > 1
    grid = _grid(random, sizes)
    return Draw(
        model=random.choice(KINDS if grid is None else MIXTURES),
        layers=layers,
        axes=axes,
        bounds=tuple(sorted(random.sample(range(1, layers + 2), pipeline * chunks - 1))),
        schedule=kind.value,
        chunks=chunks,
        slices=_slices(random, kind),
        microbatch=microbatch,
        microbatches=microbatches,
        exchange=_meeting(random, sizes.get("context", 1)),
        experts=grid,
        sharding=random.choice(list(Sharding)[1:] if shared else [Sharding.NONE]).value,
        sequence_parallel=sizes.get("tensor", 1) > 1 and random.random() < 0.5,
        recompute=_recompute(random, layers),
        frozen=_frozen(random, layers + 2),
        documents=random.choice(list(Documents)).value,
        optimizer=random.choice(list(OPTIMIZERS)),
        z_loss=random.choice((0.0, 1e-3)),
        clip_norm=random.choice((None, 0.5)),
    )


def _axes(random: Random) -> tuple[tuple[str, int], ...]:
    """Some number of ranks over the axes, in the usual order or another."""
    names, left, sizes = list(AxisName), random.choice(RANKS), dict[str, int]()
    while left > 1:
        factor = next(prime for prime in (2, 3) if left % prime == 0)
        name = random.choice(names).value
        sizes[name], left = sizes.get(name, 1) * factor, left // factor
    order = [name.value for name in names if name.value in sizes]
    if random.random() < 0.4:
        random.shuffle(order)
    return tuple((name, sizes[name]) for name in order)


def _slices(random: Random, kind: ScheduleKind) -> int:
    if kind is ScheduleKind.GPIPE and random.random() < 0.5:
        return 1
    return random.choice((2, 4)) if kind in SLICED else 1


def _schedule(random: Random, pipeline: int) -> tuple[ScheduleKind, int]:
    kinds = NAMED if pipeline > 1 else [ScheduleKind.ONE_F_ONE_B, ScheduleKind.BREADTH_FIRST]
    kind = random.choice(kinds)
    if kind in V_SHAPES:
        return kind, 2
    return kind, random.choice((2, 3)) if kind in LOOPS else 1


def _meeting(random: Random, context: int) -> tuple[str, int, str]:
    if context == 1:
        return Draw().exchange
    inner = random.choice([size for size in range(1, context + 1) if context % size == 0])
    return random.choice(list(ExchangeKind)).value, inner, random.choice(list(TokenLayout)).value


def _grid(random: Random, sizes: dict[str, int]) -> tuple[int, int, str] | None:
    """A grid of experts over the ranks of a stage, on some draws."""
    if random.random() < 0.6 or all(name == "pipeline" for name in sizes):
        return None
    return random.choice((1, 2, 4)), random.choice((1, 1, 2)), random.choice(list(Dispatch)).value


def _recompute(random: Random, layers: int) -> tuple[str, ...]:
    """One kind for all layers, or one for each."""
    kinds = [kind.value for kind in Recompute]
    if random.random() < 0.5:
        return (random.choice(kinds),) * layers
    return tuple(random.choice(kinds) for _ in range(layers))


def _frozen(random: Random, blocks: int) -> tuple[int, ...]:
    """On some draws the first blocks, on fewer some anywhere."""
    chance = random.random()
    if chance < 0.7:
        return ()
    if chance < 0.85:
        return tuple(range(random.randint(1, blocks - 1)))
    return tuple(sorted(random.sample(range(blocks), random.randint(1, blocks - 1))))
