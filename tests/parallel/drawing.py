"""Drawing: plans over all dimensions at once, the same for the same seed."""

from __future__ import annotations

from random import Random

from meshwright.schedule.build import LOOPS, NAMED, SLICED, V_SHAPES
from meshwright.search.degree_rules import microbatches_fill
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.plan import AxisName, Dispatch, Recompute, ScheduleKind, Sharding
from tests.parallel.adding import added, is_whole
from tests.parallel.draws import KINDS, MIXTURES, OPTIMIZERS, Draw, build, refused
from tests.parallel.parity_cases import Documents
from tests.support.designs import SEQUENCE

RANKS = (1, 2, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 8, 8, 8)
MOST_SEQUENCES = 16
MOST_LAYERS = 8
TRIES = 40


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
            found[added(one)] = None
    return sorted(found, key=lambda draw: draw.ranks)


def _is_drawn(draw: Draw) -> bool:
    """Legal, of microbatches that fill the pipeline: fewer are of `_unfilled`."""
    return not refused(draw) and microbatches_fill(build(draw)) is None


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
        length=_length(random, sizes.get("context", 1)),
    )


def _axes(random: Random) -> tuple[tuple[str, int], ...]:
    """Some number of ranks over the axes, in the usual order or another."""
    names, left, sizes = list(AxisName), random.choice(RANKS), dict[str, int]()
    while left > 1:
        factor = next(prime for prime in (2, 3, 5, 7) if left % prime == 0)
        name = random.choice(names).value
        sizes[name], left = sizes.get(name, 1) * factor, left // factor
    order = [name.value for name in names if name.value in sizes]
    if random.random() < 0.4:
        random.shuffle(order)
    return tuple((name, sizes[name]) for name in order)


def _length(random: Random, context: int) -> int:
    """Mostly SEQUENCE, where two parts a context rank divide that."""
    if SEQUENCE % (2 * context):
        return 4 * context
    return random.choice((SEQUENCE, SEQUENCE, SEQUENCE, 24, 12, 13))


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
