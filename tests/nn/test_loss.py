"""Losses and their gradients equal plain cross entropy; the logits are read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from meshwright.nn import token_losses
from meshwright.nn.loss import AS_WRITTEN
from meshwright.spec.targets import MASKED


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 700, 5000, generator=generator, dtype=torch.float64).to(dtype) * 4
    return logits.requires_grad_(), torch.randint(0, 5000, (3, 700), generator=generator)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_loss_and_gradient_are_exact(z_loss: float) -> None:
    logits, targets = case()
    plain = logits.detach().clone().requires_grad_()
    weights = torch.rand(targets.shape, dtype=torch.float64)
    expected = functional.cross_entropy(plain.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    expected = expected + z_loss * plain.logsumexp(-1).square()
    (expected * weights).sum().backward()
    found = token_losses(logits * 1.0, targets, z_loss=z_loss)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    (found * weights).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_masked_targets_have_no_loss_and_no_gradient(z_loss: float) -> None:
    logits, targets = case()
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) < 0.5] = MASKED
    plain = logits.detach().clone().requires_grad_()
    expected = functional.cross_entropy(plain.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    expected = expected + torch.where(targets == MASKED, 0.0, z_loss * plain.logsumexp(-1).square())
    expected.sum().backward()
    found = token_losses(logits * 1.0, targets, z_loss=z_loss)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    found.sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-12, atol=1e-14)
    assert not logits.grad[targets == MASKED].any()


def test_half_precision_logits_give_full_precision_losses() -> None:
    logits, targets = case(torch.bfloat16)
    found = token_losses(logits * 1.0, targets)
    assert found.dtype is torch.float32
    expected = functional.cross_entropy(logits.detach().float().flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_a_second_backward_is_refused() -> None:
    logits, targets = case()
    losses = token_losses(logits * 1.0, targets).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        losses.backward()


def test_a_target_near_one_keeps_its_gradient_in_half_precision() -> None:
    """A probability of 0.9995 is 1 in bf16, and less the whole nothing."""
    logits = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    logits[..., 3] = 11.75
    plain = logits.float().requires_grad_()
    functional.cross_entropy(plain[0], torch.tensor([3])).backward()
    logits.requires_grad_()
    token_losses(logits * 1.0, torch.tensor([[3]])).sum().backward()
    assert plain.grad[0, 0, 3] < 0.0
    torch.testing.assert_close(logits.grad.float(), plain.grad, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_passes_are_compiled_and_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compiler(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            compiled.append(call.__name__)
            return call(*args)

        return run

    monkeypatch.setattr(torch, "compile", compiler)
    logits, targets = case(dtype)
    token_losses(logits * 1.0, targets).sum().backward()
    plain, logits.grad = logits.grad, None
    token_losses(logits * 1.0, targets, passes=AS_WRITTEN.compiled()).sum().backward()
    assert set(compiled) == {"_sums", "_gradient"}
    assert torch.equal(logits.grad, plain)
