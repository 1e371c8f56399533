"""Attention under a mask of documents, on an accelerator."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn.attention import AttentionCore
from meshwright.nn.context import Context
from meshwright.spec.model import Attention

pytestmark = pytest.mark.gpu
LENGTH, HEADS, WIDTH = 4096, 16, 64


def test_fewer_keys_than_queries_under_a_mask_write_out_no_scores() -> None:
    """What it gives is what processors give, and it holds less than one head's scores in fp32 for every head."""
    core = AttentionCore(Attention(width=1024, heads=HEADS, kv_heads=4, head_dim=WIDTH, norm=None), head_dim=WIDTH)
    torch.manual_seed(1)
    given = [torch.randn(1, LENGTH, heads, WIDTH, dtype=torch.bfloat16) for heads in (HEADS, 4, 4)]
    documents = (torch.arange(LENGTH) // 700)[None]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    there = [x.cuda().requires_grad_() for x in given]
    result = core(*there, None, Context(documents=documents.cuda()))
    result.square().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < HEADS * LENGTH**2 * 4
    expected = core(*(x.float() for x in given), None, Context(documents=documents))
    torch.testing.assert_close(result.float().cpu(), expected, rtol=0.05, atol=0.05)
