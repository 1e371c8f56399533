"""Gradients in eight bits: nothing is lost but the last rounding, and every byte is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from meshwright.cost import memory, predict
from meshwright.cost.states import left_bytes
from meshwright.cost.table import PlanTable
from meshwright.parallel import compress
from meshwright.parallel.compress import Rounding
from meshwright.parallel.wire import Wire
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import BLOCK, GradientSync
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
# Over two axes one after the other, of which each owes what it left.
HYBRID = (
    Layout(replicate=2, shard=2, sharding=Sharding.GRADIENTS, batch=BATCH),
    Layout(replicate=2, context=2, batch=BATCH),
    Layout(replicate=2, shard=2, tensor=2, sharding=Sharding.PARAMETERS, sequence_parallel=True, batch=BATCH),
    Layout(pipeline=2, replicate=2, context=2, sharding=Sharding.OPTIMIZER, batch=BATCH),
    Layout(shard=2, context=2, sharding=Sharding.PARAMETERS, batch=BATCH),
)


def narrow(layout: Layout, precision: Precision = Precision.FP8) -> Design:
    entry = design(TINY, layout)
    return replace(entry, plan=replace(entry.plan, gradients=GradientSync(precision=precision)))


def rounding(size: int, *, parts: int, wire: Wire, dtype: torch.dtype = torch.float32) -> Rounding:
    return Rounding(size, parts=parts, dtype=dtype, device=torch.device("cpu"), wire=wire)


def most_left(owed: torch.Tensor, packed: torch.Tensor, wire: Wire) -> torch.Tensor:
    """What rounding leaves of `owed` (parts, n) at most: half a step of a scale, or a sixteenth of a number in e4m3."""
    if wire is Wire.INT4:
        blocks = packed[:, : owed.shape[1] // BLOCK * 2].contiguous().view(torch.bfloat16).to(owed.dtype)
        return blocks.repeat_interleave(BLOCK, dim=1) * 0.51
    scale = packed[:, :4].contiguous().view(torch.float32).to(owed.dtype)
    return torch.maximum(owed.abs() / 16, scale * 2.0**-10) * 1.01 if wire is Wire.E4M3 else scale / 2


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("size", [1001, 5, 1])
def test_what_was_sent_and_what_is_left_is_all_there_was(wire: Wire, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    place = rounding(size, parts=4, wire=wire, dtype=torch.float64)
    part = -(-size // 4)
    blocks = -(-part // BLOCK)
    sent, exact = torch.zeros(4 * place.left.shape[1], dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for _ in range(50):
        x = torch.randn(size, dtype=torch.float64, generator=generator) * torch.logspace(-8, 2, size)
        packed = place.pack(x)
        assert packed.shape == (4, 66 * blocks if wire is Wire.INT4 else part + 4)
        found = place.unpack(packed, torch.float64)
        assert torch.equal(place.total(packed, torch.float64), ((found[0] + found[1]) + found[2]) + found[3])
        sent += found.view(-1)
        exact += x
        assert bool((place.left.abs() <= most_left(found + place.left, packed, wire)).all())
    torch.testing.assert_close(sent[:size] + place.left.view(-1)[:size], exact, rtol=0, atol=1e-9)
    assert not sent[size:].any()
    assert float((sent[:size] - exact).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize("wire", Wire)
def test_pieces_that_go_through_a_cache_are_those_of_the_whole(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    whole = rounding(3000, parts=2, wire=wire)
    monkeypatch.setattr(compress, "CACHED_ELEMENTS", 2 * BLOCK)
    pieces = rounding(3000, parts=2, wire=wire)
    packed = whole.pack(x)
    assert torch.equal(pieces.pack(x), packed)
    assert torch.equal(pieces.left, whole.left)
    assert torch.equal(pieces.unpack(packed, torch.float32), whole.unpack(packed, torch.float32))


@pytest.mark.parametrize("wire", Wire)
def test_no_number_is_too_small_or_nothing_at_all(wire: Wire) -> None:
    place = rounding(8, parts=2, wire=wire)
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-30, -3e-30, 0.0, 2e-30])
    found = place.unpack(place.pack(x), torch.float32).view(-1)[:8]
    torch.testing.assert_close(found, x, rtol=1 / 16, atol=3.1e-30 / 14 if wire is Wire.INT4 else 0)
    assert not found[:4].any()


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_reaches_whoever_reads_it(wire: Wire, spoilt: float) -> None:
    place = rounding(2 * BLOCK, parts=2, wire=wire)
    x = torch.ones(2 * BLOCK)
    x[3] = spoilt
    found = place.unpack(place.pack(x), torch.float32)
    assert not found[0].isfinite().any()
    assert bool(found[1].isfinite().all())


def test_eight_bits_are_those_of_a_cast() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    cast, read, again = every.view(torch.float8_e4m3fn).float(), torch.empty(256), torch.empty(256, dtype=torch.uint8)
    Wire.E4M3.read(every, read)
    known = cast.isfinite()
    assert torch.equal(read[known], cast[known])
    Wire.E4M3.write(read.clone(), again)
    assert torch.equal(again[known], every[known])


@pytest.mark.parametrize(
    ("layout", "precision"),
    sampled(
        [*((layout, Precision.FP8) for layout in LAYOUTS), *((layout, Precision.INT8) for layout in LAYOUTS[:3])],
        quick=2,
    ),
    ids=str,
)
def test_sums_over_steps_are_one_rounding_from_exact_ones(pool: Pool, layout: Layout, precision: Precision) -> None:
    """What two ranks still owe, and the owner of a sum."""
    check_sums(pool, layout, precision, owed=3.0)


@pytest.mark.parametrize("layout", sampled(HYBRID, quick=1), ids=str)
def test_so_they_are_over_two_axes(pool: Pool, layout: Layout) -> None:
    """Two ranks of two replicas owe, then two replicas, then the owner of a sum."""
    check_sums(pool, layout, Precision.INT8, owed=7.0)


def test_shards_that_replicas_have_too_are_rounded_as_written_out(pool: Pool) -> None:
    entry = narrow(HYBRID[0], Precision.INT8)
    assert max(pool.run(compress_cases.beside_the_written_out, entry, ranks=4)) < 1e-12


def check_sums(pool: Pool, layout: Layout, precision: Precision, *, owed: float) -> None:
    exact = pool.run(compress_cases.steps_without_update, design(TINY, layout), STEPS, ranks=layout.ranks)
    found = pool.run(compress_cases.steps_without_update, narrow(layout, precision), STEPS, ranks=layout.ranks)
    most = max(left for _, _, left in found)
    changed = 0
    # A tied table and partial sums come after.
    for (_, wanted, none), (first, total, left) in zip(exact, found, strict=True):
        assert none == 0.0
        assert left > 0.0
        for name, value in total.items():
            numpy.testing.assert_allclose(value, wanted[name], rtol=0, atol=owed * most + 1e-9, err_msg=name)
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


@pytest.mark.parametrize("layout", [*LAYOUTS[:3], *HYBRID[:2]], ids=str)
@pytest.mark.parametrize("precision", EIGHT)
def test_what_is_left_is_what_the_cost_model_counts(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, layout: Layout, precision: Precision
) -> None:
    entry = narrow(layout, precision)
    one = numpy.full((1, 1), float(TINY.parameters))
    shards = layout.shard if layout.sharding is not Sharding.NONE else 1
    told = left_bytes(PlanTable.from_plan(entry.plan), trained=one, owned=one / shards).item()
    assert all(left == told for left in pool.run(compress_cases.bytes_left, entry, ranks=layout.ranks))
    # What passes while buckets meet is apart.
    monkeypatch.setattr(memory, "on_the_way", lambda *_, **__: None)
    parts = predict(with_speed(entry)).memory[0].parts
    monkeypatch.setattr(memory, "left_bytes", lambda table, **held: 0.0 * left_bytes(table, **held))
    without = predict(with_speed(entry)).memory[0].parts
    assert {part: parts[part] - without[part] for part in parts} == {
        part: told if part == MemoryPart.BUFFERS else 0.0 for part in parts
    }


@pytest.mark.parametrize("layout", [*LAYOUTS[:3], pytest.param(HYBRID[0], marks=pytest.mark.slow)], ids=str)
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
