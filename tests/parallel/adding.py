"""Adding: dimensions that a draw gets by itself alone, so that one that is new leaves all others what they were."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from meshwright.schedule import planned
from meshwright.schedule.build import SLICED
from meshwright.schedule.synthesize import synthesize
from meshwright.schedule.workload import Workload
from meshwright.search.degree_rules import least_microbatches
from meshwright.search.runtime_rules import EIGHT_BIT_GRADIENTS
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Attention, FeedForward
from meshwright.spec.optimizer import Moments
from meshwright.spec.plan import AxisName, Offload, ScheduleKind, Sharding, TensorGrid
from tests.parallel.draws import ADAFACTOR, GROUPS, MIXTURES, PLAIN_SGD, Draw, refused, scheduled
from tests.parallel.parity_cases import Masks
from tests.support import models

MOST_RANKS = 8
# Models of layers that a square or cube of tensor ranks can hold.
PLAIN = tuple(
    name
    for name, spec in models.all_models().items()
    if all(isinstance(part, (Attention, FeedForward)) for layer in spec.layers for part in layer.parts)
)


def added(draw: Draw) -> Draw:
    """The draw with what is added to it, which no rule refuses."""
    draw = _tabled(replace(draw, masks=_masks(draw), prefix=_prefix(draw), slices=_slices_shared(draw)))
    draw = _routed(replace(draw, factored=_factored(draw)))
    draw = _by_means(_few_heads(_uneven(_sharded(_offloaded(_on_grid(draw))))))
    return _more(_over_others(_kept(_unfilled(_counted(draw)))))


def _more(draw: Draw) -> Draw:
    """Each of these where the plan can have it; by the draw alone."""
    random = Random(f"more {draw}")
    for way in (_unlike, _ended, _grouped, _without_momentum, _with_empty_rows, _apart, _placed, _again):
        one = way(draw, random)
        draw = draw if one == draw or refused(one) else one
    return draw


def _unlike(draw: Draw, random: Random) -> Draw:
    """Of a third layers that are all of a kind of their own, mixtures among them where its model has some."""
    mixtures = [kind for kind in models.LAYERS if "mixture" in kind]
    has_some = draw.model in MIXTURES
    kinds = random.choices([kind for kind in models.LAYERS if has_some or kind not in mixtures], k=draw.layers)
    if has_some and not set(kinds) & set(mixtures):
        kinds[random.randrange(draw.layers)] = random.choice(mixtures)
    return replace(draw, kinds=tuple(kinds)) if random.random() < 1 / 3 else draw


def _ended(draw: Draw, random: Random) -> Draw:
    """Of a third a head that is tied, of a third learned positions."""
    return replace(draw, tied=random.random() < 1 / 3, positions=random.random() < 1 / 3)


def _grouped(draw: Draw, random: Random) -> Draw:
    """Of a third parameters that are treated otherwise than the others."""
    return replace(draw, groups=random.choice(list(GROUPS))) if random.random() < 2 / 5 else draw


def _without_momentum(draw: Draw, random: Random) -> Draw:
    """Of half of those under SGD."""
    return replace(draw, optimizer=PLAIN_SGD) if draw.optimizer == "sgd" and random.random() < 1 / 2 else draw


def _with_empty_rows(draw: Draw, random: Random) -> Draw:
    """Of half of those of several data ranks."""
    data = draw.size(AxisName.REPLICATE) * draw.size(AxisName.SHARD)
    return replace(draw, empty_rows=random.randrange(1, data)) if data > 1 and random.random() < 1 / 2 else draw


def _apart(draw: Draw, random: Random) -> Draw:
    """Of a third something else of each block in the host's memory; parameters are there of all or none."""
    usual = [kind.value for kind in Offload if kind is not Offload.PARAMETERS]
    kinds = tuple(random.choices(usual, k=draw.layers + 2))
    unlike = len(set(kinds)) > 1 and random.random() < 1 / 3
    return replace(draw, offload=Draw().offload, offloads=kinds) if unlike else draw


def _placed(draw: Draw, random: Random) -> Draw:
    """Of a quarter ranks on devices of other numbers: what starts processes heeds it, and nothing of a rank may."""
    devices = list(range(draw.ranks))
    random.shuffle(devices)
    return replace(draw, placement=tuple(devices)) if draw.ranks > 1 and random.random() < 1 / 4 else draw


def _again(draw: Draw, random: Random) -> Draw:
    """Of a third a second step."""
    return replace(draw, steps=2) if random.random() < 1 / 3 else draw


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
    """One step of it with gradients that travel in eight bits, or products rounded to eight or four, where the plan can
    have them; routers choose otherwise where products are. By the draw alone."""
    random, draw = Random(f"rounded {draw}"), replace(draw, steps=1)
    meets = any(draw.size(axis) > 1 for axis in (AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT))
    gradients = [replace(draw, gradients=kind.value) for kind in EIGHT_BIT_GRADIENTS if meets]
    products = [replace(draw, precision=kind.value) for kind in Precision if kind.quantized and not draw.has_mixtures]
    random.shuffle(gradients)
    random.shuffle(products)
    ways = [*gradients, *products] if random.random() < 1 / 2 else [*products, *gradients]
    return next((one for one in ways if not refused(one)), draw)


def narrow(draw: Draw) -> Draw:
    """One step of it in a precision that trains, with gradients that travel as they are, in two bytes or in eight; by
    the draw alone."""
    random = Random(f"narrow {draw}")
    one = replace(draw, steps=1, precision=random.choice(("fp32", "bf16", "bf16")))
    return replace(one, gradients=random.choice((one.gradients, Precision.BF16.value, Precision.FP64.value)))
