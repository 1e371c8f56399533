"""Products by units for eight bits, which torch also makes on processors: those of the emulation."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwright import catalog
from meshwright.parallel import apply, build_mesh, build_optimizer, lay
from meshwright.parallel import scaled as scaled_module
from meshwright.parallel.quantized import emulated, magnitude, quantized, recipe
from meshwright.parallel.scaled import coded, multiplier, scaled
from meshwright.search.runtime_rules import SCALED_PRECISIONS, TRAINED_PRECISIONS, trained_precisions
from meshwright.spec.cluster import Precision
from tests.parallel.parity_cases import SEED, batch
from tests.support import models
from tests.support.designs import Layout, design

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(16, 32, 16), (5, 19, 33), (1, 1, 1), (40, 100, 7)]


def operands(precision: Precision, gradient: bool, shape: tuple[int, int, int]):
    generator = torch.Generator().manual_seed(sum(shape))
    rows, deep, columns = shape
    left = torch.randn(rows, deep, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    right = torch.randn(columns, deep, generator=generator)
    how = recipe(precision)
    assert how is not None
    return [(left, how.gradient if gradient else how.activation), (right, how.weight)]


@pytest.mark.parametrize("precision", SCALED_PRECISIONS)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_units_multiply_what_the_emulation_does(
    precision: Precision, gradient: bool, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    pairs = operands(precision, gradient, shape)
    found, wanted = scaled(pairs, None, dtype=dtype), emulated(pairs, None, dtype=torch.float32)
    assert found.shape == (shape[0], shape[2])
    assert found.dtype is dtype
    # Of each sum what fp32 loses of the sum of magnitudes, and where the result is bf16 half of its step.
    (left, right) = quantized(pairs, None)
    bound = (left.abs() @ right.abs().T) * 2.0**-20 + (wanted.abs() * 2.0**-8 if dtype is torch.bfloat16 else 0.0)
    assert bool(((found.float() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("precision", SCALED_PRECISIONS)
def test_some_rows_at_a_time_have_the_numbers_of_all_at_once(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pairs in (operands(precision, True, (40, 100, 7)), operands(precision, False, (100, 40, 3))):
        x, how = pairs[0]
        for given in (x, x.T.contiguous().T, x.to(torch.bfloat16)):
            monkeypatch.setattr(scaled_module, "_AT_ONCE", given.numel())
            whole, scale = coded(given, how, largest=magnitude(given))
            monkeypatch.setattr(scaled_module, "_AT_ONCE", 3 * given.shape[1])
            parts, same = coded(given, how, largest=magnitude(given))
            assert parts.is_contiguous()
            assert torch.equal(parts.view(torch.uint8), whole.view(torch.uint8))
            assert torch.equal(scale, same)


@pytest.mark.parametrize("precision", SCALED_PRECISIONS)
def test_the_numbers_are_those_of_the_emulation_bit_by_bit(precision: Precision) -> None:
    for gradient in (False, True):
        pairs = operands(precision, gradient, (40, 100, 7))
        for (x, how), wanted in zip(pairs, quantized(pairs, None), strict=True):
            codes, scale = coded(x, how, largest=x.abs().amax())
            assert torch.equal(codes.to(torch.float32) * scale, wanted)


@pytest.mark.parametrize("precision", SCALED_PRECISIONS)
def test_a_model_trains_by_them_as_by_the_emulation(precision: Precision) -> None:
    """Step by step from the same weights, since one rounding that falls otherwise leads to other weights."""
    entry = design(models.model(layers=1), Layout(batch=2, microbatch=2, precision=precision))
    mesh = build_mesh(entry.plan, device_type="cpu")
    wanted = lay(entry, mesh, device="cpu", seed=SEED)
    with mock.patch.object(apply, "multiplier", return_value=scaled):
        found = lay(entry, mesh, device="cpu", seed=SEED)
    optimizer, losses = build_optimizer(wanted, entry.job.optimizer), []
    tokens, targets, _ = batch(2, entry.plan.sequence_length, models.VOCAB)
    for _ in range(4):
        for (_, theirs), (_, ours) in zip(wanted.named_parameters(), found.named_parameters(), strict=True):
            ours.data.copy_(theirs.data)
            ours.grad = None
        losses.append(float(wanted.step(tokens, targets)))
        assert float(found.step(tokens, targets)) == pytest.approx(losses[-1], abs=1e-5)
        off, whole = 0.0, 0.0
        for (_, theirs), (_, ours) in zip(wanted.named_parameters(), found.named_parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            off += float((ours.grad - theirs.grad).square().sum())
            whole += float(theirs.grad.square().sum())
        # Less than a step of the format, an eighth, moves the gradient where a scale is no power of two.
        assert off < (0.05**2 if precision is Precision.FP8 else 1e-12) * whole
        wanted.clip(1.0)
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_accelerators_use_their_units_and_processors_none() -> None:
    assert multiplier(torch.device("cuda")) is scaled
    assert multiplier(torch.device("cpu")) is emulated


def test_who_trains_eight_bits_is_told_by_devices_and_model() -> None:
    tiny, mixture = models.model(), models.all_models()["mixture_full"]
    h100, a100 = catalog.load_cluster("8xH100"), catalog.load_cluster("8xA100-80GB")
    assert trained_precisions(h100, tiny) == (*TRAINED_PRECISIONS, *SCALED_PRECISIONS)
    assert trained_precisions(h100, mixture) == TRAINED_PRECISIONS
    assert trained_precisions(a100, tiny) == TRAINED_PRECISIONS
    both = replace(h100, groups=(*h100.groups, *a100.groups))
    assert trained_precisions(both, tiny) == TRAINED_PRECISIONS
