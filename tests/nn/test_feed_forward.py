from __future__ import annotations

import torch

from meshwright.nn.feed_forward import Hidden
from meshwright.spec.model import Activation


def test_a_clamped_gate_is_its_formula_and_its_gradient_that_of_autograd() -> None:
    torch.manual_seed(0)
    gate, up = (10 * torch.randn(200, dtype=torch.float64) for _ in range(2))
    assert (gate > 7).any()
    assert (up.abs() > 7).any()

    def formula(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        g, u = g.clamp(max=7.0), u.clamp(min=-7.0, max=7.0)
        return g * torch.sigmoid(1.702 * g) * (u + 1.0)

    results = []
    for function in (Hidden(Activation.CLAMPED_SWIGLU), formula):
        inputs = [x.clone().requires_grad_() for x in (gate, up)]
        out = function(*inputs)
        out.backward(torch.linspace(-1, 1, 200, dtype=torch.float64))
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
