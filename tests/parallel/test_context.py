"""Context parallel: every layout, exchange and mask gives what one device gives, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.plan import Axis, AxisName, Design, Recompute, ScheduleKind, Sharding
from tests.parallel.parity_cases import Documents
from tests.parallel.test_parity import BATCH, MODEL, check, name
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled
from tests.support.space import covering, emitted

TWO = Documents.TWO
RING, GATHER = ExchangeKind.RING, ExchangeKind.GATHER
STRIPED, BALANCED, CONTIGUOUS = TokenLayout.STRIPED, TokenLayout.BALANCED, TokenLayout.CONTIGUOUS
KINDS = tuple(models.all_models())
PREFIXED = models.prefixed()

# Every way to meet under every layout of tokens; with documents half of them, which a layout may follow.
EXCHANGES = [
    Exchange(kind=kind, inner=inner, layout=layout)
    for layout in TokenLayout
    for kind, inner in ((RING, 1), (GATHER, 1), (RING, 2))
]
TWO_LEVEL = [Exchange(kind=kind, inner=2, layout=layout) for layout in TokenLayout for kind in (RING, GATHER)]

# Every kind of block: all need one exchange at least, and meet the others in turn; two of three are slow.
TURNS = [
    pytest.param(kind, EXCHANGES[place % len(EXCHANGES)], marks=[pytest.mark.slow] if place % 3 else [])
    for place, kind in enumerate(KINDS)
]

COMBINED = (
    ("gpt", Layout(context=2, tensor=2, sequence_parallel=True, exchange=Exchange(layout=BALANCED), batch=4)),
    ("mixture_full", Layout(context=2, tensor=2, sequence_parallel=True, exchange=Exchange(kind=GATHER), batch=4)),
    ("sinks", Layout(context=2, tensor=2, exchange=Exchange(inner=2), batch=4)),
    ("tied", Layout(context=2, pipeline=2, recompute=Recompute.FULL, exchange=Exchange(layout=BALANCED), batch=4)),
    (
        "window",
        Layout(
            context=2,
            pipeline=2,
            kind=ScheduleKind.INTERLEAVED,
            chunks=2,
            recompute=Recompute.SELECTIVE,
            exchange=Exchange(kind=GATHER, layout=STRIPED),
            batch=4,
        ),
    ),
    ("tied", Layout(context=2, shard=2, sharding=Sharding.OPTIMIZER, microbatch=2, batch=8)),
    ("tiny", Layout(context=2, shard=2, sharding=Sharding.GRADIENTS, exchange=Exchange(inner=2), batch=8)),
    ("gpt", Layout(context=2, replicate=2, sharding=Sharding.PARAMETERS, recompute=Recompute.SELECTIVE, batch=4)),
    ("tiny", Layout(context=2, shard=2, replicate=2, sharding=Sharding.PARAMETERS, batch=8)),
    (
        "tied",
        Layout(context=2, tensor=2, pipeline=2, sequence_parallel=True, sharding=Sharding.PARAMETERS, batch=4),
    ),
)

PARTS = 8


@cache
def listed(ranks: int) -> list[Design]:
    """What the search lists with a context axis."""
    return [entry for entry in emitted(MODEL, ranks=ranks, batch=BATCH) if entry.plan.context > 1]


FEW = covering(listed(2))


@cache
def many() -> list[Design]:
    """On more ranks, those that meet every pair of choices, and some."""
    return [*covering(listed(4)), *listed(8)[::40]]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_every_layout_of_tokens_and_every_exchange(pool: Pool, exchange: Exchange) -> None:
    entry = design(MODEL, Layout(context=2, exchange=exchange, batch=4))
    check(pool, entry)
    check(pool, entry, packed=Documents.TWO)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_prompts_that_see_all_of_themselves(pool: Pool, exchange: Exchange) -> None:
    """Prefix masks, with windows and chunks and without, meet keys of later ranks."""
    entry = design(PREFIXED, Layout(context=2, exchange=exchange, batch=4))
    check(pool, entry, packed=Documents.ONE if exchange.kind is GATHER else Documents.TWO)


@pytest.mark.parametrize(("kind", "exchange"), TURNS, ids=str)
def test_every_kind_of_block(pool: Pool, kind: str, exchange: Exchange) -> None:
    check(pool, design(models.all_models()[kind], Layout(context=2, exchange=exchange, batch=4)), packed=Documents.TWO)


@pytest.mark.parametrize("entry", sampled(FEW, quick=7), ids=name)
def test_a_plan_of_the_search(pool: Pool, entry: Design) -> None:
    check(pool, entry, packed=Documents.TWO)


@pytest.mark.parametrize("exchange", sampled(TWO_LEVEL, quick=4), ids=str)
def test_trading_heads_inside_and_meeting_outside(pool: Pool, exchange: Exchange) -> None:
    check(
        pool,
        design(PREFIXED if exchange.layout is BALANCED else MODEL, Layout(context=4, exchange=exchange, batch=4)),
        packed=TWO if exchange.kind is RING else Documents.ONE,
    )


def test_more_traders_than_heads_of_keys_share_copies(pool: Pool) -> None:
    check(pool, design(MODEL, Layout(context=4, exchange=Exchange(inner=4), batch=4)), packed=Documents.TWO)


def test_more_hops_than_neighbours(pool: Pool) -> None:
    """Of four ranks, blocks come by that no neighbour holds, and sums of gradients that travel on."""
    for model in (*(models.all_models()[kind] for kind in ("tiny", "window", "chunk")), PREFIXED):
        check(pool, design(model, Layout(context=4, batch=4)))


@pytest.mark.parametrize(("kind", "layout"), sampled(COMBINED, quick=3), ids=str)
def test_with_every_other_axis(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, design(models.all_models()[kind], layout, z_loss=1e-3), packed=Documents.TWO)


ORDERS = (
    (AxisName.CONTEXT, AxisName.SHARD, AxisName.TENSOR),
    pytest.param((AxisName.SHARD, AxisName.TENSOR, AxisName.CONTEXT), marks=pytest.mark.slow),
    (AxisName.CONTEXT, AxisName.PIPELINE, AxisName.SHARD),
)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
def test_any_order_of_axes(pool: Pool, order: tuple[AxisName, ...]) -> None:
    sizes = {axis.value: 2 for axis in order}
    entry = design(MODEL, Layout(**sizes, sharding=Sharding.PARAMETERS, batch=BATCH))
    axes = tuple(Axis(name=axis, size=2) for axis in order)
    check(pool, replace(entry, plan=replace(entry.plan, axes=axes)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_more_plans_of_the_search(pool: Pool, part: int) -> None:
    for entry in many()[part::PARTS]:
        check(pool, entry, packed=TWO if entry.plan.world_size == 4 else Documents.ONE)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_in_every_exchange(pool: Pool, kind: str, exchange: Exchange) -> None:
    entry = design(models.all_models()[kind], Layout(context=2, exchange=exchange, batch=4), z_loss=1e-3)
    check(pool, entry)
    check(pool, entry, packed=Documents.TWO)
