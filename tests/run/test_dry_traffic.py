"""The bytes of every collective are predicted exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.run.children import in_child
from meshwright.spec.compression import AcpSgd, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.job import DataSpec, Source
from meshwright.spec.plan import Design, ExpertGrid, Recompute, ScheduleKind, Sharding, TensorGrid
from meshwright.spec.synchronize import GradientSync
from tests.run import dry_cases
from tests.run.dry_cases import case
from tests.support.designs import Layout

FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
PLAIN, PROMPTED = DataSpec(), DataSpec(sources=(Source(path="rows.jsonl", prompt_field="ask"),))
ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS
# Pairs of a kind of block and a layout in which no shard is padded.
LAYOUTS = {
    "plain": Layout(replicate=2, tensor=2, batch=4),
    "zero1": Layout(replicate=2, shard=2, tensor=2, sharding=ZERO1, sequence_parallel=True, recompute=FULL, batch=8),
    "zero2": Layout(pipeline=2, shard=2, sharding=ZERO2, recompute=SELECTIVE, batch=4),
    "zero3": Layout(shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, batch=4),
    "square": Layout(pipeline=2, tensor=4, microbatch=2, batch=4, tensor_grid=TensorGrid.SQUARE),
    "cube": Layout(replicate=2, tensor=8, recompute=FULL, microbatch=4, batch=8, tensor_grid=TensorGrid.CUBE),
    "experts again": Layout(shard=4, sharding=ZERO2, recompute=FULL, experts=ExpertGrid(expert=2), batch=4),
    "loops": Layout(pipeline=2, tensor=2, kind=ScheduleKind.INTERLEAVED, chunks=2, recompute=FULL, batch=2),
}
QUICK = (("mixture", "zero3"), ("tiny", "zero1"), ("gpt", "loops"), ("mixture_full", "plain"), ("latent", "zero2"))
AGAIN = (("mixture", "experts again"),)
GRIDS = (("tied", "square"), ("gpt", "cube"))


def check(pairs: tuple[tuple[str, str], ...], *, accelerator: bool, data: DataSpec = PLAIN) -> None:
    designs = [case(LAYOUTS[layout], kind=kind, layers=2, accelerator=accelerator) for kind, layout in pairs]
    designs = [replace(entry, job=replace(entry.job, data=data)) for entry in designs]
    found = in_child(dry_cases.count_fake, {"designs": designs, "rank": 0}, seconds=280)
    for pair, entry, counted in zip(pairs, designs, found, strict=True):
        assert told(entry) == pytest.approx(dict(counted.bytes), rel=1e-12), pair


def told(entry: Design) -> dict[str, float]:
    return dict(cost.traffic(entry, rank=0).bytes)


def test_every_byte_that_is_sent_is_predicted() -> None:
    check(QUICK, accelerator=True)


def test_experts_on_a_grid_that_backward_computes_again_are_given_as_many_tokens_as_forward() -> None:
    check(AGAIN, accelerator=True)


@pytest.mark.slow
def test_on_processors_too() -> None:
    check(QUICK[:2], accelerator=False)


@pytest.mark.slow
def test_on_squares_and_cubes_of_tensor_ranks_too() -> None:
    check(GRIDS, accelerator=True)


@pytest.mark.slow
def test_the_count_of_targets_that_are_not_masked_is_predicted() -> None:
    check(QUICK[1:3], accelerator=False, data=PROMPTED)


def test_shards_that_replicas_compress_are_predicted() -> None:
    """Inside the islands goes what goes without compression."""
    kinds = (PowerSgd(rank=2), AcpSgd(rank=2, start_step=3), TopK(share=0.03), DeMo(), OneBit())
    plain = case(Layout(replicate=2, shard=2, sharding=ZERO3, batch=8), layers=2)
    designs = [replace(plain, plan=replace(plain.plan, gradients=GradientSync(compression=kind))) for kind in kinds]
    found = in_child(dry_cases.count_fake, {"designs": designs, "rank": 0}, seconds=280)
    for entry, counted in zip(designs, found, strict=True):
        assert told(entry) == dict(counted.bytes)
        assert inside(told(entry)) == inside(told(plain))


def inside(found: dict[str, float]) -> dict[str, float]:
    """What does not go among replicas."""
    return {name: size for name, size in found.items() if not name.endswith("|replicate")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "tied"])
def test_so_they_are_in_small_buckets_beside_other_axes(kind: str) -> None:
    layouts = (
        Layout(replicate=2, shard=2, sharding=ZERO1, batch=8),
        Layout(replicate=2, shard=2, context=2, sharding=ZERO3, batch=8),
        Layout(pipeline=2, replicate=2, shard=2, tensor=2, sharding=ZERO2, sequence_parallel=True, batch=16),
        Layout(pipeline=2, replicate=2, shard=2, sharding=ZERO2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=16),
    )
    cases = [case(layout, kind=kind, layers=2) for layout in layouts]
    small = GradientSync(compression=TopK(share=0.03))
    designs = [replace(entry, plan=replace(entry.plan, gradients=small)) for entry in cases]
    found = in_child(dry_cases.count_in_small_buckets, {"designs": designs, "most": 3000}, seconds=280)
    for entry, (predicted, counted) in zip(designs, found, strict=True):
        assert predicted == counted, entry.plan.describe()
