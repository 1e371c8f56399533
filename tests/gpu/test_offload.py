"""On an accelerator, what lies in the host's memory frees the device's, and no number changes."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel import build_mesh, build_optimizer, lay
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design, Offload, Recompute
from tests.parallel.offload_cases import with_groups
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


def peak(entry: Design) -> tuple[list[float], int, int]:
    """Losses of three steps, the most bytes of the device at once, and those it holds between steps."""
    device = torch.device("cuda")
    laid = lay(entry, build_mesh(entry.plan, device_type="cuda"), device=device, seed=0)
    optimizer = build_optimizer(laid, entry.job.optimizer)
    tokens = torch.randint(0, models.VOCAB, (entry.plan.batch, SEQUENCE + 1), device=device)
    losses = []
    torch.cuda.synchronize()
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))
        optimizer.step()
        torch.cuda.synchronize()
    return losses, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_activations_in_the_hosts_memory_leave_the_device(recompute: Recompute) -> None:
    layout = Layout(batch=512, microbatch=512, precision=Precision.BF16, recompute=recompute)
    torch.manual_seed(0)
    plain = design(models.model(layers=16), layout)
    losses, most, _ = peak(plain)
    torch.manual_seed(0)
    found, less, _ = peak(with_groups(plain, offload=Offload.ACTIVATIONS))
    assert found == losses
    assert less < 0.9 * most


def test_optimizer_state_in_the_hosts_memory_leaves_the_device() -> None:
    plain = design(models.model(layers=64), Layout(batch=4, precision=Precision.FP32))
    torch.manual_seed(0)
    losses, _, kept = peak(plain)
    torch.manual_seed(0)
    found, _, less = peak(with_groups(plain, offload=Offload.OPTIMIZER))
    assert found == pytest.approx(losses, abs=1e-4)
    assert kept - less > 0.9 * 8 * plain.model.parameters
