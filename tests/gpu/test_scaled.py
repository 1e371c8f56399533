"""On an accelerator with units for eight bits, products by them are those of the emulation."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel import build_mesh, build_optimizer, lay
from meshwright.parallel.quantized import emulated, quantized, recipe
from meshwright.parallel.scaled import scaled
from meshwright.search.runtime_rules import SCALED_PRECISIONS
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design

_HAS_UNITS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HAS_UNITS, reason="no units for eight bits")]


@pytest.mark.parametrize("precision", SCALED_PRECISIONS)
@pytest.mark.parametrize("shape", [(256, 512, 128), (5, 19, 33), (1024, 4096, 1024)])
def test_units_multiply_what_the_emulation_does(precision: Precision, shape: tuple[int, int, int]) -> None:
    how = recipe(precision)
    assert how is not None
    rows, deep, columns = shape
    left = torch.randn(rows, deep, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(columns, deep, device="cuda", dtype=torch.bfloat16)
    for operand in (how.activation, how.gradient):
        pairs = [(left, operand), (right, how.weight)]
        found = scaled(pairs, None, dtype=torch.bfloat16).float()
        wanted = emulated(pairs, None, dtype=torch.float32)
        first, second = quantized(pairs, None)
        # Units of sm90 keep fourteen bits of sums between promotions.
        bound = (first.abs() @ second.abs().T) * 2.0**-12 + wanted.abs() * 2.0**-8
        assert bool(((found - wanted).abs() <= bound).all())


@pytest.mark.parametrize("precision", [Precision.BF16, *SCALED_PRECISIONS])
@pytest.mark.parametrize(
    "spec", [OptimizerSpec(), OptimizerSpec(state=Moments.DYNAMIC8, master=Master.BF16_STOCHASTIC)]
)
def test_a_model_trains(precision: Precision, spec: OptimizerSpec) -> None:
    entry = design(models.model(), Layout(batch=8, microbatch=8, precision=precision), optimizer=spec)
    laid = lay(entry, build_mesh(entry.plan, device_type="cuda"), device="cuda", seed=0)
    optimizer = build_optimizer(laid, spec)
    torch.manual_seed(0)
    tokens = torch.randint(0, models.VOCAB, (entry.plan.batch, SEQUENCE + 1), device="cuda")
    losses = []
    for _ in range(20):
        losses.append(float(laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05
