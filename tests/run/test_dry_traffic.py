"""The bytes of every collective are predicted exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.job import DataSpec, Source
from meshwright.spec.plan import Design, ExpertGrid, Recompute, ScheduleKind, Sharding, TensorGrid
from meshwright.spec.synchronize import GradientSync
from tests.parallel import test_experts
from tests.run import dry_cases
from tests.run.dry_cases import case
from tests.support import models
from tests.support.designs import Layout, design

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
KINDS = (None, AcpSgd(rank=2, start_step=3), PowerSgd(rank=2), TopK(share=0.03), DeMo(), OneBit())
AGAIN = (("mixture", "experts again"),)
GRIDS = (("tied", "square"), ("gpt", "cube"), ("full_norm", "square"), ("full_norm", "cube"))


def check(
    pairs: tuple[tuple[str, str], ...], *, accelerator: bool, data: DataSpec = PLAIN, beside: Sequence[Design] = ()
) -> None:
    designs = [case(LAYOUTS[layout], kind=kind, layers=2, accelerator=accelerator) for kind, layout in pairs]
    designs = [replace(entry, job=replace(entry.job, data=data)) for entry in designs]
    designs += beside
    found = dry_cases.apart(dry_cases.count_fake, designs=designs, rank=0)
    for entry, counted in zip(designs, found, strict=True):
        assert told(entry) == pytest.approx(dict(counted.bytes), rel=1e-12), entry.plan.describe()


def compressed(kind: Compression | None) -> Design:
    """Of two islands that shard inside."""
    plain = case(Layout(replicate=2, shard=2, sharding=ZERO3, batch=8), layers=2)
    return replace(plain, plan=replace(plain.plan, gradients=GradientSync(compression=kind)))


def rounded() -> Design:
    """The same, all of whose gradients travel in eight bits."""
    plain = compressed(None)
    return replace(plain, plan=replace(plain.plan, gradients=GradientSync(precision=Precision.INT8)))


def thin(layout: Layout) -> Design:
    """Of thin matrices."""
    return design(models.factored(models.gpt(layers=1)), layout)


def counting(name: str, layout: Layout) -> Design:
    """Of experts that are counted along sequences."""
    return design(test_experts.model(name, routing=test_experts.BOTH[name]), layout)


def told(entry: Design) -> dict[str, float]:
    return dict(cost.traffic(entry, rank=0).bytes)


def test_every_byte_that_is_sent_is_predicted() -> None:
    check(QUICK, accelerator=True, beside=[*(compressed(kind) for kind in KINDS[2:4]), rounded()])


def test_so_is_that_of_tensor_ranks_whose_gradients_no_bucket_holds() -> None:
    """Distributed gradients add up there, of layouts that torch works out under a fake mode of its own."""
    layouts = (Layout(tensor=2, batch=4), Layout(tensor=2, sequence_parallel=True, batch=4))
    check((), accelerator=False, beside=[thin(layout) for layout in layouts])


def test_what_replicas_compress_changes_nothing_inside_islands() -> None:
    plain, *small = ({n: x for n, x in told(compressed(kind)).items() if "replicate" not in n} for kind in KINDS)
    assert plain
    assert all(each == plain for each in small)


def test_so_is_what_counts_experts_along_divided_sequences() -> None:
    check((), accelerator=True, beside=[counting(name, layout) for name, layout in test_experts.ALONG[:3]])


@pytest.mark.slow
def test_so_is_what_tensor_ranks_compare_for_scales_of_whole_tensors() -> None:
    """Of linears, of experts that all of them divide, and of slices of experts on a grid."""
    again = Layout(tensor=2, sequence_parallel=True, recompute=FULL, batch=2, precision=Precision.FP8)
    grid = ExpertGrid(expert=2, tensor=2)
    cases = {
        "tiny": again,
        "mixture": Layout(tensor=2, batch=2, precision=Precision.NVFP4),
        "mixture_full": replace(again, replicate=2, batch=4, experts=grid, recompute=Recompute.NONE),
    }
    check((), accelerator=False, beside=[design(models.all_models()[kind], layout) for kind, layout in cases.items()])


@pytest.mark.slow
def test_so_is_all_that_counts_them() -> None:
    check((), accelerator=False, beside=[counting(name, layout) for name, layout in test_experts.ALONG])


@pytest.mark.slow
def test_so_is_every_kind_of_compression() -> None:
    check((), accelerator=True, beside=[compressed(kind) for kind in KINDS[1:]])


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
    found = dry_cases.apart(dry_cases.count_in_small_buckets, designs=designs, most=3000)
    for entry, (predicted, counted) in zip(designs, found, strict=True):
        assert predicted == counted, entry.plan.describe()
