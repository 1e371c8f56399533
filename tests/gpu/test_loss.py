"""On an accelerator the loss is that of plain cross entropy, as written and compiled, with one copy of a chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn.loss import AS_WRITTEN, LossPasses, token_losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, VOCAB = 2048, 128_256


def case() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(TOKENS, VOCAB, generator=generator)
    return logits.to(torch.bfloat16).to(DEVICE), torch.randint(VOCAB, (TOKENS,), generator=generator).to(DEVICE)


def of(passes: LossPasses) -> tuple[Tensor, Tensor]:
    logits, targets = case()
    logits.requires_grad_()
    losses = token_losses(logits * 1.0, targets, passes=passes)
    losses.sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


@pytest.mark.parametrize("compiled", [False, True], ids=["as written", "compiled"])
def test_losses_and_gradients_are_those_of_cross_entropy(compiled: bool) -> None:
    losses, gradient = of(AS_WRITTEN.compiled() if compiled else AS_WRITTEN)
    logits, targets = case()
    plain = logits.float().requires_grad_()
    expected = functional.cross_entropy(plain, targets, reduction="none")
    expected.sum().backward()
    assert plain.grad is not None
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.float(), plain.grad, rtol=2**-7, atol=1e-6)


def test_one_copy_of_a_chunk_is_held() -> None:
    logits, targets = case()
    logits.requires_grad_()
    made = logits * 1.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    token_losses(made, targets).sum().backward()
    chunk, of_losses = 2**26 * 4, 64 * TOKENS * 8
    assert torch.cuda.max_memory_allocated() - before < 1.1 * chunk + made.nbytes + of_losses
