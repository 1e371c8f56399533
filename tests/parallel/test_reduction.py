"""Compressed gradients: nothing is lost, every rank has the same bits, and full ranks and shares change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from meshwright.cost import memory, predict
from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.plan import Design
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import GradientSync
from tests.parallel import reduction_cases
from tests.support import models
from tests.support.designs import Layout, design, with_speed
from tests.support.pool import Pool
from tests.support.sampled import sampled

TINY = models.model(layers=2)
LAYOUTS = (
    Layout(replicate=2, batch=4),
    Layout(replicate=2, tensor=2, sequence_parallel=True, batch=4),
    Layout(pipeline=2, replicate=2, batch=4),
)
KINDS: tuple[Compression, ...] = (
    PowerSgd(rank=2),
    AcpSgd(rank=2),
    TopK(share=0.1),
    DeMo(chunk=16, decay=1.0),
    OneBit(),
)
FULL: tuple[Compression, ...] = (PowerSgd(rank=64), AcpSgd(rank=64), TopK(share=1.0), DeMo(chunk=8, largest=8))
FACTORED = slice(7, 7 + 33 * 17 + 9 * 40 + 3 * 12 * 11)


def compressed(layout: Layout, kind: Compression) -> Design:
    entry = design(TINY, layout)
    return replace(entry, plan=replace(entry.plan, gradients=GradientSync(compression=kind)))


def test_what_was_sent_and_what_is_left_is_all_there_was(pool: Pool) -> None:
    ranks = pool.run(reduction_cases.sums, KINDS, 5, False, ranks=2)
    for place, kind in enumerate(KINDS):
        of = [found[place] for found in ranks]
        for other in of[1:]:
            numpy.testing.assert_array_equal(of[0].given, other.given)
        exact, size = sum(each.own for each in of), of[0].given.size
        left = numpy.zeros(size)
        if isinstance(kind, PowerSgd | AcpSgd):
            part = left[FACTORED]
            part += sum(each.left[: part.size] for each in of)
        elif isinstance(kind, TopK | DeMo):
            left += sum(each.left for each in of)
        else:
            part = -(-size // 2)
            sent = sum(each.left[: 2 * part] for each in of)
            left += (sent + numpy.concatenate([each.left[2 * part :] for each in of]))[:size]
        numpy.testing.assert_allclose(of[0].given + left, exact, rtol=0, atol=1e-9, err_msg=kind.words)
        assert float(numpy.abs(left).max()) > 1e-3


def test_full_factors_and_shares_are_the_whole(pool: Pool) -> None:
    for found in zip(*pool.run(reduction_cases.sums, FULL, 3, False, ranks=2), strict=True):
        exact = found[0].own + found[1].own
        numpy.testing.assert_allclose(found[0].given, exact, rtol=0, atol=1e-9)


def test_gradients_of_no_higher_rank_than_the_factors_arrive_whole(pool: Pool) -> None:
    """PowerSGD finds their space within a step; ACP-SGD in odd ones, which make up for those before."""
    low = (PowerSgd(rank=2), AcpSgd(rank=2), PowerSgd(rank=3))
    for found in zip(*pool.run(reduction_cases.sums, low, 4, True, ranks=2), strict=True):
        numpy.testing.assert_allclose(found[0].given, found[0].own + found[1].own, rtol=0, atol=1e-9)


def test_a_number_that_is_none_reaches_every_rank(pool: Pool) -> None:
    for found in pool.run(reduction_cases.spoilt, KINDS, ranks=2):
        assert all(found)


def test_parameters_larger_than_a_bucket_meet(pool: Pool) -> None:
    assert all(found == [True] * len(FULL) for found in pool.run(reduction_cases.in_small_buckets, FULL, ranks=2))


@pytest.mark.parametrize("kind", [*KINDS[:4], OneBit(start_step=3)], ids=lambda kind: kind.words)
def test_what_is_kept_is_what_the_cost_model_counts(
    pool: Pool, kind: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what passes while buckets meet."""
    monkeypatch.setattr(memory, "on_the_way", lambda *_, **__: None)
    layout = LAYOUTS[1]
    plain, small = (predict(with_speed(each)).memory[0] for each in (design(TINY, layout), compressed(layout, kind)))
    told = small.parts[MemoryPart.BUFFERS] - plain.parts[MemoryPart.BUFFERS]
    assert pool.run(reduction_cases.bytes_kept, compressed(layout, kind), ranks=4) == [told] * 4


@pytest.mark.parametrize("layout", sampled(LAYOUTS, quick=2), ids=str)
def test_full_factors_and_shares_train_as_whole_gradients_do(pool: Pool, layout: Layout) -> None:
    wanted = pool.run(reduction_cases.trained, design(TINY, layout), 3, ranks=layout.ranks)
    late = replace(KINDS[0], start_step=4)
    for kind in (*FULL, late):
        found = pool.run(reduction_cases.trained, compressed(layout, kind), 3, ranks=layout.ranks)
        for (losses, parameters, _), (exact, held, _) in zip(found, wanted, strict=True):
            assert losses == pytest.approx(exact, rel=1e-9)
            for name, value in held.items():
                numpy.testing.assert_allclose(parameters[name], value, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.words)
def test_replicas_stay_the_same_and_near_the_whole(pool: Pool, kind: Compression) -> None:
    layout = LAYOUTS[0]
    exact = pool.run(reduction_cases.trained, design(TINY, layout), 4, ranks=2)[0][0]
    (losses, ours, left), (_, theirs, _) = pool.run(reduction_cases.trained, compressed(layout, kind), 4, ranks=2)
    assert left > 0.0
    assert losses != exact
    assert losses == pytest.approx(exact, abs=0.3)
    for name, value in ours.items():
        numpy.testing.assert_array_equal(value, theirs[name])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.words)
def test_a_resumed_run_is_the_unbroken_one(pool: Pool, tmp_path: Path, kind: Compression) -> None:
    for on, again, alike in pool.run(reduction_cases.resumed, compressed(LAYOUTS[0], kind), str(tmp_path), ranks=2):
        assert again == on
        assert alike
