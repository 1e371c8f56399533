"""Experts on a grid of their own give what one device gives, in float64 to 1e-9, however their tokens reach them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.model import Layer, Mixture, ModelSpec
from meshwright.spec.plan import Dispatch, ExpertGrid, Recompute, ScheduleKind, Sharding
from tests.parallel.test_parity import check
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool

GATHER = Dispatch.ALL_GATHER
ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS


def grid(expert: int, tensor: int = 1, dispatch: Dispatch = Dispatch.ALL_TO_ALL) -> ExpertGrid:
    return ExpertGrid(expert=expert, tensor=tensor, dispatch=dispatch)


def model(name: str = "mixed", *, layers: int = 2, **changes: object) -> ModelSpec:
    part: Mixture = models.mixture(experts=8, **changes)
    layer = Layer(mixer=models.attention(), transform=part)
    dense = Layer(mixer=models.attention(), transform=models.feed_forward())
    built = models.model(name, layer=layer, layers=layers)
    return replace(built, layers=(*built.layers[:-1], dense, built.layers[-1]))


PLAIN = model()
FULL = model(
    "full",
    expert_bias=True,
    router_bias=True,
    shared=models.feed_forward(norm=None, hidden=24, bias=True),
    shared_gate=True,
)
LAYOUTS = (
    # two ranks
    Layout(replicate=2, experts=grid(2), batch=4),
    Layout(shard=2, sharding=ZERO3, experts=grid(2), batch=4),
    Layout(shard=2, sharding=ZERO1, experts=grid(1, 2), batch=4),
    Layout(tensor=2, sequence_parallel=True, experts=grid(2), batch=2),
    Layout(tensor=2, sequence_parallel=True, experts=grid(1, 1), batch=2),
    Layout(replicate=2, experts=grid(2, dispatch=GATHER), batch=4),
    # four ranks: experts over data and tensor ranks together, beside shards of what is left
    Layout(shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(4), batch=4),
    Layout(shard=2, tensor=2, sharding=ZERO2, sequence_parallel=True, experts=grid(2), batch=4),
    Layout(shard=4, sharding=ZERO3, experts=grid(2), recompute=Recompute.FULL, batch=8),
    Layout(shard=4, sharding=ZERO1, experts=grid(2, 2), batch=8, microbatch=2),
    Layout(replicate=2, tensor=2, sequence_parallel=True, experts=grid(2, 2), batch=4),
    Layout(replicate=2, shard=2, sharding=ZERO3, experts=grid(2), batch=4),
    Layout(replicate=2, shard=2, sharding=ZERO2, experts=grid(1, 2, GATHER), batch=8),
    Layout(pipeline=2, shard=2, sharding=ZERO1, experts=grid(2), recompute=Recompute.FULL, batch=8),
    Layout(pipeline=2, shard=2, experts=grid(2), sharding=ZERO2, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=4),
    Layout(shard=2, tensor=2, sharding=ZERO1, sequence_parallel=True, experts=grid(2, 2, GATHER), batch=4),
    Layout(shard=4, sharding=ZERO3, experts=grid(1), batch=4),
)
EIGHT = (
    Layout(pipeline=2, shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(4), batch=8),
    Layout(replicate=2, shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(2, 2), batch=8),
    Layout(shard=8, sharding=ZERO3, experts=grid(2), batch=8),
    Layout(replicate=4, tensor=2, sequence_parallel=True, experts=grid(8), recompute=Recompute.SELECTIVE, batch=8),
    Layout(replicate=2, shard=4, sharding=ZERO2, experts=grid(8, dispatch=GATHER), batch=8),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_grid_of_experts_gives_what_one_device_gives(pool: Pool, layout: Layout) -> None:
    check(pool, design(FULL, layout, z_loss=1e-3), documents=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT, ids=str)
def test_eight_ranks_do_so_too(pool: Pool, layout: Layout) -> None:
    check(pool, design(FULL, layout), documents=True)
