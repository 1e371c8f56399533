"""The tracked peak of small known computations equals what a hand counts."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.spec.report import MemoryPart
from meshwright.train.observe.memory import MemoryTracker

FLOAT = 4


class Square(nn.Module):
    """y = sigmoid(x W): autograd keeps x and the sigmoid's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ self.weight)


def test_a_forward_and_backward_peak_at_the_hand_count() -> None:
    rows, width = 64, 16
    model, x = Square(width), torch.randn(rows, width)
    tracker = MemoryTracker(parts=[model])
    with tracker.watching():
        before = tracker.current_bytes
        y = model(x)
        y.backward(torch.ones_like(y))
        del y
    peak = tracker.peak()
    hidden = rows * width * FLOAT
    # At the weight's gradient there live: sigmoid's output, the ones, its gradient, the gradient of the weight.
    assert peak.parts[MemoryPart.PARAMETERS] == width * width * FLOAT
    assert peak.parts[MemoryPart.GRADIENTS] == width * width * FLOAT
    assert peak.parts[MemoryPart.ACTIVATIONS] == 2 * hidden
    assert peak.parts[MemoryPart.BUFFERS] == before - width * width * FLOAT + hidden
    assert peak.total == before + width * width * FLOAT + 3 * hidden
    assert tracker.current_bytes == before + width * width * FLOAT


def test_what_autograd_saves_lives_until_backward() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    module = nn.Module()
    module.weight = parameter
    tracker = MemoryTracker(parts=[module])
    with tracker.watching():
        start = tracker.current_bytes
        loss = parameter.exp().sum()
        held = tracker.current_bytes - start
        loss.backward()
        del loss
        after = tracker.current_bytes - start
    assert held == 1000 * FLOAT + FLOAT  # exp keeps its result; the sum is a number
    assert after == 1000 * FLOAT  # the gradient alone


def test_a_view_is_counted_with_its_storage_once() -> None:
    tracker = MemoryTracker(parts=[])
    with tracker.watching():
        start = tracker.current_bytes
        base = torch.zeros(256)
        views = [base[index:] for index in range(10)]
        assert tracker.current_bytes - start == 256 * FLOAT
        del base
        assert tracker.current_bytes - start == 256 * FLOAT
        del views
        assert tracker.current_bytes == start


def test_optimizer_state_has_its_own_part() -> None:
    model = Square(32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tracker = MemoryTracker(parts=[model], optimizer=optimizer)
    with tracker.watching():
        model(torch.randn(4, 32)).sum().backward()
        tracker.mark_owned()
        optimizer.step()
    peak = tracker.peak()
    matrix = 32 * 32 * FLOAT
    assert peak.parts[MemoryPart.OPTIMIZER] >= 2 * matrix
    assert peak.parts[MemoryPart.OPTIMIZER] <= 2 * matrix + 64
    assert peak.parts[MemoryPart.GRADIENTS] == matrix


def test_logits_are_told_by_the_vocabulary() -> None:
    model = nn.Linear(8, 4096, bias=False)
    tracker = MemoryTracker(parts=[model], vocab=4096)
    with tracker.watching():
        model(torch.randn(2, 16, 8)).logsumexp(-1).sum().backward()
    assert tracker.peak().parts[MemoryPart.LOGITS] >= 2 * 16 * 4096 * FLOAT


def test_a_storage_that_grows_in_place_is_followed() -> None:
    tracker = MemoryTracker(parts=[])
    with tracker.watching():
        start = tracker.current_bytes
        flat = torch.zeros(64)
        flat.untyped_storage().resize_(0)
        assert tracker.current_bytes == start
        flat.untyped_storage().resize_(64 * FLOAT)
        assert tracker.current_bytes == start + 64 * FLOAT
    assert tracker.peak().parts[MemoryPart.BUFFERS] >= 64 * FLOAT
