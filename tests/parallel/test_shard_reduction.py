"""Hybrid sharding whose replicas compress: full ranks change nothing, and all replicas have the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from meshwright.cost import memory, predict
from meshwright.spec.compression import Compression, OneBit, PowerSgd, TopK
from meshwright.spec.plan import Design, ScheduleKind, Sharding
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import GradientSync
from tests.parallel import reduction_cases
from tests.parallel.test_reduction import FULL, KINDS
from tests.support import models
from tests.support.designs import Layout, design, with_speed
from tests.support.pool import Pool

ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS
SHARDED = Layout(replicate=2, shard=2, sharding=ZERO3, batch=8)
OTHERS = (
    SHARDED,
    replace(SHARDED, sharding=ZERO1),
    replace(SHARDED, sharding=ZERO2),
    Layout(replicate=2, context=2, sharding=ZERO3, batch=4),
    Layout(replicate=2, shard=3, sharding=ZERO2, batch=12),
    replace(SHARDED, tensor=2, sequence_parallel=True),
    replace(SHARDED, pipeline=2, sharding=ZERO1),
    replace(SHARDED, pipeline=2, sharding=ZERO2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=16),
    replace(SHARDED, pipeline=2, kind=ScheduleKind.BREADTH_FIRST, chunks=2),
)


def compressed(layout: Layout, kind: Compression, *, model: str = "tiny") -> Design:
    entry = design(models.all_models()[model], layout)
    return replace(entry, plan=replace(entry.plan, gradients=GradientSync(compression=kind)))


def check_full(pool: Pool, layout: Layout, kinds: tuple[Compression, ...], *, model: str = "tiny") -> None:
    plain = compressed(layout, kinds[0], model=model)
    plain = replace(plain, plan=replace(plain.plan, gradients=GradientSync()))
    wanted = pool.run(reduction_cases.trained, plain, 3, ranks=layout.ranks)
    for kind in kinds:
        found = pool.run(reduction_cases.trained, compressed(layout, kind, model=model), 3, ranks=layout.ranks)
        for (losses, parameters, _), (exact, held, _) in zip(found, wanted, strict=True):
            assert losses == pytest.approx(exact, rel=1e-9)
            for name, value in held.items():
                numpy.testing.assert_allclose(parameters[name], value, rtol=0, atol=1e-9, err_msg=f"{kind} {name}")


def test_full_factors_and_shares_train_as_whole_gradients_do(pool: Pool) -> None:
    check_full(pool, SHARDED, (PowerSgd(rank=64), TopK(share=1.0), PowerSgd(rank=2, start_step=4)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_so_they_do_under_every_sharding_beside_other_axes(pool: Pool, layout: Layout) -> None:
    check_full(pool, layout, FULL)


@pytest.mark.slow
def test_so_they_do_where_the_head_is_tied(pool: Pool) -> None:
    check_full(pool, replace(SHARDED, pipeline=2), FULL, model="tied")


@pytest.mark.parametrize("kinds", [KINDS[:1], pytest.param(KINDS[1:], marks=pytest.mark.slow)], ids=("one", "others"))
def test_replicas_stay_the_same_and_near_the_whole(pool: Pool, kinds: tuple[Compression, ...]) -> None:
    exact = pool.run(reduction_cases.trained, design(models.all_models()["tiny"], SHARDED), 4, ranks=4)[0][0]
    for kind in kinds:
        found = pool.run(reduction_cases.trained, compressed(SHARDED, kind), 4, ranks=4)
        (losses, ours, left) = found[0]
        assert left > 0.0
        assert losses != exact
        assert losses == pytest.approx(exact, abs=0.3)
        for _, theirs, _ in found[1:]:
            for name, value in ours.items():
                numpy.testing.assert_array_equal(value, theirs[name])


def test_what_is_kept_is_what_the_cost_model_counts(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what passes while buckets meet."""
    monkeypatch.setattr(memory, "on_the_way", lambda *_, **__: None)
    plain = predict(with_speed(design(models.all_models()["tiny"], SHARDED))).memory[0]
    for kind in KINDS[:4]:
        small = predict(with_speed(compressed(SHARDED, kind))).memory[0]
        told = small.parts[MemoryPart.BUFFERS] - plain.parts[MemoryPart.BUFFERS]
        assert pool.run(reduction_cases.bytes_kept, compressed(SHARDED, kind), ranks=4) == [told] * 4


@pytest.mark.parametrize(
    "kind", [PowerSgd(rank=2), pytest.param(TopK(share=0.1), marks=pytest.mark.slow)], ids=("powersgd", "topk")
)
def test_a_resumed_run_is_the_unbroken_one(pool: Pool, tmp_path: Path, kind: Compression) -> None:
    for on, again, alike in pool.run(reduction_cases.resumed, compressed(SHARDED, kind), str(tmp_path), ranks=4):
        assert again == on
        assert alike


def test_a_number_that_is_none_reaches_all_and_what_was_left_is_dropped(pool: Pool) -> None:
    for kind in (PowerSgd(rank=2), OneBit()):
        for norm, left in pool.run(reduction_cases.spoilt_step, compressed(SHARDED, kind), ranks=4):
            assert not numpy.isfinite(norm)
            assert left == 0.0


def test_the_norm_that_clips_is_that_of_what_all_ranks_have(pool: Pool) -> None:
    for norm, own in pool.run(reduction_cases.norms, compressed(SHARDED, PowerSgd(rank=2)), ranks=4):
        assert norm == pytest.approx(own, rel=1e-12)
