"""What the core of attention asks of torch's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn.attention import AttentionCore
from meshwright.nn.context import Context
from meshwright.spec.model import Attention

SPEC = Attention(width=32, heads=4, kv_heads=2, head_dim=8, norm=None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, bool]]:
    """Of every call how many heads of keys it had, whether they were fewer than queries, and whether it had a mask."""
    found: list[tuple[int, bool, bool]] = []

    def attend(q: Tensor, k: Tensor, _v: Tensor, *, attn_mask: Any, enable_gqa: bool, **_options: Any) -> Tensor:
        found.append((k.shape[1], enable_gqa, attn_mask is not None))
        return torch.zeros_like(q)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    return found


def attend(device: str, documents: Tensor | None) -> Tensor:
    q, k, v = (torch.zeros(1, 6, heads, 8, device=device) for heads in (4, 2, 2))
    context = Context(documents=None if documents is None else documents.to(device))
    result: Tensor = AttentionCore(SPEC, head_dim=8)(q, k, v, None, context)
    return result


def test_with_a_mask_kernels_of_accelerators_are_given_as_many_keys_as_queries(
    asked: list[tuple[int, bool, bool]],
) -> None:
    many = torch.arange(6)[None] // 2
    assert attend("meta", many).shape == (1, 6, 4, 8)
    attend("meta", None)
    assert asked == [(4, False, True), (2, True, False)]


def test_processors_repeat_no_keys(asked: list[tuple[int, bool, bool]]) -> None:
    attend("cpu", None)
    attend("cpu", torch.zeros(1, 6, dtype=torch.int64))
    assert {(heads, grouped) for heads, grouped, _ in asked} == {(2, True)}
