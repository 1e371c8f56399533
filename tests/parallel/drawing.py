"""Drawing: plans over all dimensions at once, the same for the same seed."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from meshwright.schedule import planned
from meshwright.schedule.build import LOOPS, NAMED, SLICED, V_SHAPES
from meshwright.schedule.synthesize import synthesize
from meshwright.schedule.workload import Workload
from meshwright.search.degree_rules import least_microbatches, microbatches_fill
from meshwright.search.runtime_rules import EIGHT_BIT_GRADIENTS
from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.model import Attention, FeedForward
from meshwright.spec.optimizer import Moments
from meshwright.spec.plan import AxisName, Dispatch, Offload, Recompute, ScheduleKind, Sharding, TensorGrid
from tests.parallel.draws import ADAFACTOR, KINDS, MIXTURES, OPTIMIZERS, Draw, build, refused, scheduled
from tests.parallel.parity_cases import Documents, Masks
from tests.support import models

RANKS = (1, 2, 2, 3, 4, 4, 4, 4, 6, 8, 8, 8, 8)
MOST_RANKS = max(RANKS)
MOST_SEQUENCES = 16
MOST_LAYERS = 8
TRIES = 40
# Models of layers that a square or cube of tensor ranks can hold.
PLAIN = tuple(
    name
    for name, spec in models.all_models().items()
    if all(isinstance(part, (Attention, FeedForward)) for layer in spec.layers for part in layer.parts)
)


def legal(count: int, *, seed: int) -> list[Draw]:
    """`count` different draws that no rule refuses, the same for the same seed, ordered by ranks.

    Axes and a schedule are drawn first and the rest anew until it is legal, so that no rule makes them rare.
    """
    random, found = Random(seed), dict[Draw, None]()
    while len(found) < count:
        axes = _axes(random)
        kind, chunks = _schedule(random, dict(axes).get("pipeline", 1))
        tries = (_any(random, axes, kind, chunks) for _ in range(TRIES))
        one = next((one for one in tries if one is not None and is_whole(one) and _is_drawn(one)), None)
        if one is not None:
            one = _tabled(replace(one, masks=_masks(one), prefix=_prefix(one), slices=_slices_shared(one)))
            routed = _routed(replace(one, factored=_factored(one)))
            one = _by_means(_few_heads(_uneven(_sharded(_offloaded(_on_grid(routed))))))
            found[_over_others(_kept(_unfilled(_counted(one))))] = None
    return sorted(found, key=lambda draw: draw.ranks)


def _is_drawn(draw: Draw) -> bool:
    """Legal, of microbatches that fill the pipeline: fewer are of `_unfilled`."""
    return not refused(draw) and microbatches_fill(build(draw)) is None


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


def _routed(draw: Draw) -> Draw:
    """Of mixtures, as likely as its own, each way of routing where the plan can have it; by the draw alone."""
    if draw.model not in MIXTURES:
        return draw
    one = replace(draw, routing=Random(f"routing {draw}").choice((draw.routing, *models.ROUTINGS)))
    return draw if refused(one) or counts_parts(one) else one


def counts_parts(draw: Draw) -> bool:
    """Whether experts are counted along sequences that ranks or slices divide: such are of `_counted`."""
    return draw.routing in models.COUNTED and (draw.slices > 1 or draw.size(AxisName.CONTEXT) > 1)


def _counted(draw: Draw) -> Draw:
    """Of half of the mixtures of which ranks or slices divide the sequences, experts counted along those; by the draw
    alone."""
    random = Random(f"counted {draw}")
    one = replace(draw, routing=random.choice(models.COUNTED))
    if draw.model not in MIXTURES or draw.routing != "own" or not counts_parts(one) or random.random() > 1 / 2:
        return draw
    return draw if refused(one) else one


def _on_grid(draw: Draw) -> Draw:
    """Of those with tensor ranks, with four of them as a square or eight as a cube where there is room; by the draw
    alone."""
    random, tensor = Random(f"grid {draw}"), draw.size(AxisName.TENSOR)
    room = MOST_RANKS * tensor // draw.ranks
    kinds = [one for one in (TensorGrid.SQUARE, TensorGrid.CUBE) if 2**one.dims <= room]
    if tensor == 1 or draw.size(AxisName.CONTEXT) > 1 or draw.slices > 1 or not kinds:
        return draw
    kind = random.choice(kinds)
    one = replace(
        draw,
        model=draw.model if draw.model in PLAIN else random.choice(PLAIN),
        axes=tuple((name, 2**kind.dims if name == AxisName.TENSOR.value else size) for name, size in draw.axes),
        tensor_grid=kind.value,
        microbatch=kind.token_parts(2**kind.dims),
        **{name: getattr(Draw(), name) for name in ("sequence_parallel", "experts", "frozen", "routing")},
    )
    return draw if refused(one) else one


def _offloaded(draw: Draw) -> Draw:
    """Of a third something in the host's memory, parameters where they are shards of zero3; by the draw alone."""
    random, whole = Random(f"offload {draw}"), draw.sharding != Sharding.PARAMETERS.value
    if random.random() > 1 / 3:
        return draw
    kind = random.choice((Offload.OPTIMIZER, Offload.ACTIVATIONS)) if whole else Offload.PARAMETERS
    one = replace(draw, offload=kind.value)
    return draw if refused(one) else one


def _sharded(draw: Draw) -> Draw:
    """Of a third of those that are sharded every block in a way of its own, or layers alike and both ends otherwise;
    by the draw alone."""
    random, kinds = Random(f"shards {draw}"), [kind.value for kind in Sharding if kind is not Sharding.NONE]
    if draw.sharding == Sharding.NONE.value or random.random() > 1 / 3:
        return draw
    inside = random.choice(([random.choice(kinds)] * draw.layers, random.choices(kinds, k=draw.layers)))
    end = random.choice(kinds)
    one = replace(draw, shards=(end, *inside, end))
    return draw if len(set(one.shards)) == 1 or refused(one) else one


def _over_others(draw: Draw) -> Draw:
    """Of a third of those that are sharded every block over the shard axis, a part of it or several; by the draw
    alone."""
    random, shard = Random(f"extents {draw}"), draw.size(AxisName.SHARD)
    data = shard * draw.size(AxisName.REPLICATE)
    others = [n for n in range(1, data + 1) if n != shard and data % n == 0 and (shard % n == 0 or n % shard == 0)]
    if draw.sharding == Sharding.NONE.value or random.random() > 1 / 3 or not others:
        return draw
    inside = [random.choice((0, *others)) for _ in range(draw.layers)]
    end = random.choice((0, *others))
    one = replace(draw, extents=(end, *inside, end))
    return draw if not any(one.extents) or refused(one) else one


def _uneven(draw: Draw) -> Draw:
    """Of half of those with tensor ranks a vocabulary that not every number of them divides; by the draw alone."""
    random = Random(f"vocabulary {draw}")
    if draw.size(AxisName.TENSOR) == 1 or random.random() > 1 / 2:
        return draw
    one = replace(draw, vocab=random.choice((61, 37, 43, 5)))
    return draw if refused(one) else one


def _few_heads(draw: Draw) -> Draw:
    """Of half of those with tensor ranks one key-value head in every second layer, of which all of them have copies; by
    the draw alone."""
    one = replace(draw, kv_heads=1)
    kept = draw.size(AxisName.TENSOR) == 1 or Random(f"heads {draw}").random() > 1 / 2 or refused(one)
    return draw if kept else one


def _by_means(draw: Draw) -> Draw:
    """Of a fifth second moments as means of rows and columns; by the draw alone."""
    one = replace(draw, optimizer=ADAFACTOR)
    return draw if Random(f"means {draw}").random() > 1 / 5 or refused(one) else one


def _unfilled(draw: Draw) -> Draw:
    """Of two thirds of pipelines fewer microbatches than fill it; by the draw alone."""
    random, pipeline = Random(f"fewer {draw}"), draw.size(AxisName.PIPELINE)
    least = least_microbatches(ScheduleKind(draw.schedule), pipeline=pipeline, slices=draw.slices)
    if least == 1 or random.random() > 2 / 3:
        return draw
    one = replace(draw, fewer=draw.microbatches - random.randrange(1, least))
    return draw if refused(one) else one


def _kept(draw: Draw) -> Draw:
    """Of a third under AdamW moments in less than fp32, which a first step makes of nothing; by the draw alone."""
    random = Random(f"moments {draw}")
    one = replace(draw, moments=random.choice([kind.value for kind in Moments if kind is not Moments.FP32]))
    return draw if draw.optimizer != "adamw" or random.random() > 1 / 3 or refused(one) else one


def rounded(draw: Draw) -> Draw:
    """With gradients that travel in eight bits, or products rounded to eight or four, where the plan can have them; by
    the draw alone."""
    random = Random(f"rounded {draw}")
    meets = any(draw.size(axis) > 1 for axis in (AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT))
    gradients = [replace(draw, gradients=kind.value) for kind in EIGHT_BIT_GRADIENTS if meets]
    products = [replace(draw, precision=kind.value) for kind in Precision if kind.quantized]
    random.shuffle(gradients)
    random.shuffle(products)
    ways = [*gradients, *products] if random.random() < 1 / 2 else [*products, *gradients]
    return next((one for one in ways if not refused(one)), draw)


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
