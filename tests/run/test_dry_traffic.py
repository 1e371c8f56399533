"""The bytes of every collective are predicted exactly."""

from __future__ import annotations

import pytest

from meshwright import cost
from meshwright.run.children import in_child
from meshwright.spec.plan import Design, Recompute, ScheduleKind, Sharding
from tests.run import dry_cases
from tests.run.dry_cases import case
from tests.support import models
from tests.support.designs import Layout

FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS
# Pairs of a kind of block and a layout; the slow tests take every kind in the layouts whose shards are never padded.
LAYOUTS = {
    "plain": Layout(replicate=2, tensor=2, batch=4),
    "zero1": Layout(replicate=2, shard=2, tensor=2, sharding=ZERO1, sequence_parallel=True, recompute=FULL, batch=8),
    "zero2": Layout(pipeline=2, shard=2, sharding=ZERO2, recompute=SELECTIVE, batch=4),
    "zero3": Layout(shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, batch=4),
    "loops": Layout(pipeline=2, tensor=2, kind=ScheduleKind.INTERLEAVED, chunks=2, recompute=FULL, batch=2),
    "all at once": Layout(pipeline=2, replicate=2, kind=ScheduleKind.GPIPE, batch=4),
}
QUICK = (("mixture", "zero3"), ("tiny", "zero1"), ("gpt", "loops"), ("mixture_full", "plain"), ("latent", "zero2"))


def check(pairs: tuple[tuple[str, str], ...], *, accelerator: bool) -> None:
    designs = [case(LAYOUTS[layout], kind=kind, layers=2, accelerator=accelerator) for kind, layout in pairs]
    found = in_child(dry_cases.count_fake, {"designs": designs, "rank": 0}, seconds=280)
    for pair, entry, counted in zip(pairs, designs, found, strict=True):
        assert told(entry) == pytest.approx(dict(counted.bytes), rel=1e-12), pair


def told(entry: Design) -> dict[str, float]:
    return dict(cost.traffic(entry, rank=0).bytes)


def test_every_byte_that_is_sent_is_predicted() -> None:
    check(QUICK, accelerator=True)


def test_on_processors_too() -> None:
    check(QUICK[:2], accelerator=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "loops", "all at once"])
def test_of_every_kind_of_block(layout: str) -> None:
    kinds = tuple(models.all_models())
    check(tuple((kind, layout) for kind in kinds), accelerator=True)
