"""Gradients in eight bits: nothing is lost but the last rounding, and every byte is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from meshwright.cost import predict
from meshwright.cost.states import Local, left_bytes
from meshwright.cost.table import PlanTable
from meshwright.parallel.compress import Rounding, Wire
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import GradientSync
from tests.parallel import compress_cases, layout_cases, move_cases
from tests.support import models
from tests.support.designs import Layout, design, with_speed
from tests.support.pool import Pool
from tests.support.sampled import sampled

TINY = models.model(layers=2)
BATCH, STEPS = 4, 6
LAYOUTS = (
    Layout(replicate=2, batch=BATCH),
    Layout(shard=2, sharding=Sharding.OPTIMIZER, batch=BATCH),
    Layout(shard=2, sharding=Sharding.PARAMETERS, batch=BATCH),
    Layout(replicate=2, tensor=2, batch=BATCH),
    Layout(pipeline=2, shard=2, sharding=Sharding.GRADIENTS, batch=BATCH),
)


EIGHT = (Precision.FP8, Precision.INT8)


def narrow(layout: Layout, precision: Precision = Precision.FP8) -> Design:
    entry = design(TINY, layout)
    return replace(entry, plan=replace(entry.plan, gradients=GradientSync(precision=precision)))


@pytest.mark.parametrize("wire", Wire)
def test_what_was_sent_and_what_is_left_is_all_there_was(wire: Wire) -> None:
    generator = torch.Generator().manual_seed(0)
    rounding = Rounding(1001, parts=4, dtype=torch.float64, device=torch.device("cpu"), wire=wire)
    sent, exact = torch.zeros(1004, dtype=torch.float64), torch.zeros(1001, dtype=torch.float64)
    for _ in range(50):
        x = torch.randn(1001, dtype=torch.float64, generator=generator) * torch.logspace(-8, 2, 1001)
        packed = rounding.pack(x)
        assert packed.shape == (4, 251 + 4)
        sent += rounding.unpack(packed, torch.float64).view(-1)
        exact += x
        # e4m3 is within a sixteenth of a number, or half the least step of the part's scale; int8 half a step.
        owed = rounding.unpack(packed, torch.float64) + rounding.left
        scale = packed[:, :4].contiguous().view(torch.float32).double()
        most = torch.maximum(owed.abs() / 16, scale * 2.0**-10) if wire is Wire.E4M3 else scale / 2
        assert bool((rounding.left.abs() <= most).all())
    torch.testing.assert_close(sent + rounding.left.view(-1), torch.nn.functional.pad(exact, (0, 3)), rtol=0, atol=1e-9)
    assert float((sent[:1001] - exact).abs().max()) < 0.1 * float(exact.abs().max())


def test_no_number_is_too_small_or_nothing_at_all() -> None:
    rounding = Rounding(8, parts=2, dtype=torch.float32, device=torch.device("cpu"), wire=Wire.E4M3)
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-30, -3e-30, 0.0, 2e-30])
    found = rounding.unpack(rounding.pack(x), torch.float32)
    torch.testing.assert_close(found.view(-1), x, rtol=1 / 16, atol=0)


@pytest.mark.parametrize(
    ("layout", "precision"),
    sampled(
        [*((layout, Precision.FP8) for layout in LAYOUTS), *((layout, Precision.INT8) for layout in LAYOUTS[:3])],
        quick=4,
    ),
    ids=str,
)
def test_sums_over_steps_are_one_rounding_from_exact_ones(pool: Pool, layout: Layout, precision: Precision) -> None:
    exact = pool.run(compress_cases.steps_without_update, design(TINY, layout), STEPS, ranks=layout.ranks)
    found = pool.run(compress_cases.steps_without_update, narrow(layout, precision), STEPS, ranks=layout.ranks)
    most = max(left for _, _, left in found)
    changed = 0
    # What two ranks still owe, and the owner of a sum; a tied table and partial sums come after.
    for (_, wanted, none), (first, total, left) in zip(exact, found, strict=True):
        assert none == 0.0
        assert left > 0.0
        for name, value in total.items():
            numpy.testing.assert_allclose(value, wanted[name], rtol=0, atol=3.0 * most + 1e-9, err_msg=name)
            changed += not numpy.array_equal(first[name] * STEPS, value)
    assert changed
    first_wanted = exact[0][0]
    off = max(float(numpy.abs(value - first_wanted[name]).max()) for name, value in found[0][0].items())
    assert off > 0.0


def test_all_ranks_have_the_same_gradients(pool: Pool) -> None:
    found = pool.run(compress_cases.steps_without_update, narrow(LAYOUTS[0]), 2, ranks=2)
    for name, value in found[0][1].items():
        numpy.testing.assert_array_equal(value, found[1][1][name])


def test_bytes_are_one_an_element_and_four_a_part(pool: Pool) -> None:
    for exchanged, gathered, elements in pool.run(compress_cases.bytes_sent, narrow(LAYOUTS[0]), ranks=2):
        (sent,), (kept,) = exchanged, gathered
        assert sent == elements + 2 * 4
        assert kept == elements // 2 + 4
    sharded = narrow(Layout(shard=2, sharding=Sharding.GRADIENTS, batch=BATCH))
    for exchanged, gathered, elements in pool.run(compress_cases.bytes_sent, sharded, ranks=2):
        groups = len(TINY.layers) + 2
        microbatches = sharded.plan.schedule.microbatches
        assert len(exchanged) == groups * microbatches
        assert sum(exchanged) == microbatches * (2 * elements + groups * 2 * 4)
        assert not gathered


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("precision", EIGHT)
def test_what_is_left_is_what_the_cost_model_counts(pool: Pool, layout: Layout, precision: Precision) -> None:
    entry = narrow(layout, precision)
    one, zero = numpy.full((1, 1), float(TINY.parameters)), numpy.zeros((1, 1))
    local = Local(whole=one, owned=one, trained=one, trained_owned=one, layers=zero, moments=zero, step=zero, left=zero)
    told = left_bytes(PlanTable.from_plan(entry.plan), local).item()
    assert all(left == told for left in pool.run(compress_cases.bytes_left, entry, ranks=layout.ranks))
    # ZeRO-1 is fullest at another moment once residuals are there, so that its peaks differ by more than these.
    if layout.sharding is not Sharding.OPTIMIZER:
        plain, compressed = (
            predict(with_speed(each)).memory[0].parts[MemoryPart.GRADIENTS] for each in (design(TINY, layout), entry)
        )
        assert compressed - plain == told


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_what_is_left_goes_through_a_checkpoint(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    for on, again, keys in pool.run(compress_cases.resumed, narrow(layout), str(tmp_path), ranks=layout.ranks):
        assert again == on
        assert keys


def test_another_plan_starts_with_nothing_left(pool: Pool, tmp_path: Path) -> None:
    source, target = narrow(LAYOUTS[0]), narrow(LAYOUTS[2])
    expected = pool.run(move_cases.train, source, str(tmp_path), 2, 2, ranks=2)[0]
    for losses, _ in pool.run(move_cases.go_on, target, str(tmp_path), 2, 2, ranks=2):
        assert losses == pytest.approx(expected[2:], abs=0.05)


@pytest.mark.parametrize("precision", EIGHT)
def test_training_stays_near(pool: Pool, precision: Precision) -> None:
    exact = pool.run(layout_cases.losses, design(TINY, LAYOUTS[0]), 6, ranks=2)[0]
    found = pool.run(layout_cases.losses, narrow(LAYOUTS[0], precision), 6, ranks=2)[0]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != exact
