"""Kernels of tiles agree with each other, with a softmax of whole rows, and with what accelerators' operators take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshwright.parallel import kernels_compat
from meshwright.parallel.kernels_compat import KERNELS, Scores, kernel
from tests.cost.saved_tensors import FakeTensorMode

PROCESSOR, CUDNN, FLASH, PADDED, WRITTEN = KERNELS
MASK = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
CASES = {
    "whole": Scores(scale=0.3),
    "causal": Scores(scale=0.3, causal=True),
    "masked": Scores(scale=0.3, mask=MASK),
}


def tensors(*, dims: int = 8, value_dims: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def made(heads: int, features: int) -> Tensor:
        return torch.randn(2, heads, 5, features, generator=generator, dtype=torch.float64)

    return made(4, dims), made(2, dims), made(2, value_dims)


@pytest.mark.parametrize("case", CASES)
def test_the_fused_kernel_of_processors_is_what_is_written_out(case: str) -> None:
    """Forward; and backward of a row that other tiles are part of, whose log-sum-exp is larger than this tile's."""
    (q, k, v), scores = tensors(), CASES[case]
    assert kernel(q, k, v, scores) is PROCESSOR
    out, lse = PROCESSOR.forward(q, k, v, scores)
    same, also = WRITTEN.forward(q, k, v, scores)
    torch.testing.assert_close(out, same, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, also, rtol=0, atol=1e-12)
    assert bool(lse.isinf().any()) == (case == "masked")
    whole = torch.logaddexp(lse, torch.ones_like(lse))
    gradient, joined = torch.randn_like(out), torch.randn_like(out)
    expected = WRITTEN.backward(gradient, q, k, v, joined, whole, scores)
    for found, wanted in zip(PROCESSOR.backward(gradient, q, k, v, joined, whole, scores), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_is_written_out_is_a_softmax_and_its_gradient(case: str, softcap: float | None) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(value_dims=6))
    scores = replace(CASES[case], softcap=softcap)
    assert kernel(q, k, v, scores) is (WRITTEN if softcap else PADDED)
    raw = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * scores.scale
    raw = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    mask = torch.ones(5, 5).tril().bool() if scores.causal else scores.mask
    raw = raw if mask is None else raw.masked_fill(~mask, float("-inf"))
    expected = raw.softmax(dim=-1).nan_to_num(0.0) @ v.repeat_interleave(2, dim=1)
    out, lse = (x.detach() for x in WRITTEN.forward(q, k, v, scores))
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, raw.detach().logsumexp(dim=-1), rtol=0, atol=1e-12)
    if case == "masked":
        return  # autograd of a row that nothing is seen of is not a number
    gradient = torch.randn_like(out)
    expected.backward(gradient)
    with torch.no_grad():
        found = WRITTEN.backward(gradient, q, k, v, out, lse, scores)
    for x, part in zip((q, k, v), found, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(part, x.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_narrow_values_are_padded_for_a_fused_kernel(case: str) -> None:
    (q, k, v), scores = tensors(value_dims=6), CASES[case]
    out, lse = PADDED.forward(q, k, v, scores)
    for found, expected in zip((out, lse), WRITTEN.forward(q, k, v, scores), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradient, whole = torch.randn_like(out), torch.logaddexp(lse, torch.ones_like(lse))
    expected_gradients = WRITTEN.backward(gradient, q, k, v, out, whole, scores)
    for found, expected in zip(PADDED.backward(gradient, q, k, v, out, whole, scores), expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_scores_are_written_out_for_a_few_queries_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), scores = tensors(), replace(CASES[case], softcap=2.0)
    gradient, (out, lse) = torch.randn_like(q), WRITTEN.forward(q, k, v, scores)
    joined = torch.logaddexp(lse, torch.ones_like(lse))
    wanted = WRITTEN.backward(gradient, q, k, v, out, joined, scores)
    monkeypatch.setattr(kernels_compat, "SCORES_AT_ONCE", 2 * 4 * 5 * 2)  # of two of the five queries
    parts = WRITTEN.forward(q, k, v, scores)
    found = WRITTEN.backward(gradient, q, k, v, out, joined, scores)
    for ours, theirs in zip((*parts, *found), (out, lse, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def test_accelerators_take_half_precision_to_the_flash_kernel_and_nothing_it_cannot() -> None:
    """Operators and shapes alone: fake tensors of an accelerator that is not there."""
    with FakeTensorMode():
        q, k, v = (half(2, heads, 64, 64) for heads in (8, 2, 2))
        plain = Scores(scale=0.1, causal=True)
        assert kernel(q, k, v, plain) is FLASH
        out, lse = FLASH.forward(q, k, v, plain)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 64), torch.float32)
        assert [x.shape for x in FLASH.backward(out, q, k, v, out, lse, plain)] == [q.shape, k.shape, v.shape]
        whole = torch.empty(2, 8, 64, 64, device="cuda")
        assert kernel(whole, whole, whole, plain) is WRITTEN
        many, wider = (half(2, heads, 64, 96) for heads in (8, 2))
        assert kernel(many, wider, v, plain) is PADDED
        narrow, lse = PADDED.forward(many, wider, v, plain)
        assert narrow.shape == (2, 8, 64, 64)
        given = PADDED.backward(narrow, many, wider, v, narrow, lse, plain)
        assert [x.shape for x in given] == [many.shape, wider.shape, v.shape]
        odd = half(2, 8, 64, 20)
        assert kernel(odd, odd, odd, plain) is WRITTEN
        assert kernel(q, k, v, Scores(scale=0.1, softcap=5.0)) is WRITTEN
        assert kernel(q, k, v, Scores(scale=0.1, mask=torch.ones(64, 64, dtype=torch.bool, device="cuda"))) is WRITTEN


FORWARD = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
BACKWARD = (
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
    "dropout_p is_causal scale"
)


def test_torch_prefers_cudnn_and_its_operators_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    for operator, names in (
        (aten._scaled_dot_product_cudnn_attention, FORWARD),
        (aten._scaled_dot_product_cudnn_attention_backward, BACKWARD),
    ):
        assert [entry.name for entry in operator.default._schema.arguments] == names.split()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with FakeTensorMode():
        q, k, v = (half(2, heads, 64, 64) for heads in (8, 2, 2))
        plain = Scores(scale=0.1, causal=True)
        for backend, expected in ((SDPBackend.FLASH_ATTENTION, FLASH), (SDPBackend.CUDNN_ATTENTION, CUDNN)):
            monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, chosen=backend.value, **__: chosen)
            assert kernel(q, k, v, plain) is expected
        out, lse = CUDNN.forward(q, k, v, plain)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 64), torch.float32)
        assert [x.shape for x in CUDNN.backward(out, q, k, v, out, lse, plain)] == [q.shape, k.shape, v.shape]
        assert kernel(q, k, v, Scores(scale=0.1, softcap=5.0)) is WRITTEN
        wide = half(2, 8, 64, 256)
        assert kernel(wide, wide, wide, plain) is FLASH


@pytest.mark.parametrize(("capability", "chosen"), [((7, 0), WRITTEN), ((7, 5), WRITTEN), ((8, 0), FLASH)])
def test_devices_without_flash_write_tiles_out(
    capability: tuple[int, int], chosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.FLASH_ATTENTION.value)
    with FakeTensorMode():
        q, k, v = (half(2, heads, 64, 64) for heads in (8, 2, 2))
        assert kernel(q, k, v, Scores(scale=0.1, causal=True)) is chosen
