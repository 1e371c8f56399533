"""The kernels that torch chooses on an accelerator, as far as memory and FLOPs go.

Fake tensors on a device without kernels would fall back on the composite forms of norms and attention, which keep
more, and of the backward of silu, which makes more. These keep what torch's derivatives.yaml says of the fused ones:
attention its inputs, its output and the log-sum-exp, a norm its input, its weights and one or two fp32 numbers a token,
silu its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn import grouped
from meshwright.parallel import kernels_compat
from meshwright.run.dry.torch_compat import ACCELERATOR, flop_formula
from meshwright.spec.model import visible_keys

_FORWARD = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
    }
)
_BACKWARD = frozenset(f"{name}_backward" for name in _FORWARD)
_GROUPED = frozenset({"_grouped_mm"})


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Norms, attention and silu are the fused kernels of accelerators inside."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(functional, "silu", fused_silu))
        stack.enter_context(mock.patch.object(functional, "rms_norm", fused_root_mean_square))
        stack.enter_context(mock.patch.object(functional, "layer_norm", fused_layer_norm))
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", fused_attention))
        stack.enter_context(mock.patch.object(kernels_compat, "FLASH_DEVICES", frozenset({ACCELERATOR})))
        stack.enter_context(mock.patch.object(grouped, "DEVICES", frozenset({ACCELERATOR})))
        yield


def multiplies(func: Any) -> bool:
    """Whether an operator has FLOPs."""
    name = func.overloadpacket.__name__
    return name in _FORWARD | _BACKWARD | _GROUPED or flop_formula(func) is not None


def flops_of(func: Any, arguments: Any, options: Any, result: Any) -> float:
    """FLOPs of an operator; of an attention kernel those of the scores that are seen, twice as many in backward.

    What a kernel's backward computes again for itself is not counted. Of an operator that `multiplies`.
    """
    name = func.overloadpacket.__name__
    if name in _GROUPED:
        # Each row, or each column of a weight's gradient, is multiplied with the matrix of one expert.
        return 2.0 * arguments[0].numel() * arguments[1].shape[-1]
    if name not in _FORWARD and name not in _BACKWARD:
        return float(flop_formula(func)(*arguments, **options, out_val=result))
    given = {entry.name: entry.default_value for entry in func._schema.arguments}
    given |= dict(zip(given, arguments, strict=False)) | options
    q, k, v = given["query"], given["key"], given["value"]
    batch, heads, queries, width = q.shape
    causal = given["is_causal"] and queries == k.shape[2]
    keys = visible_keys(queries, None, None) if causal else float(k.shape[2])
    once = 2.0 * batch * heads * queries * keys * (width + v.shape[-1])
    return 2.0 * once if name in _BACKWARD else once


class _FusedNorm(torch.autograd.Function):
    """A norm that keeps `statistics` numbers a token in fp32 at the least, and what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, statistics: int, *weights: Tensor | None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        kept = [x.new_empty((*x.shape[:-1], 1), dtype=dtype) for _ in range(statistics)]
        ctx.save_for_backward(x, *weights, *kept)
        ctx.number = len(weights)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        weights = [None if weight is None else torch.empty_like(weight) for weight in others[: ctx.number]]
        return torch.empty_like(x), None, *weights


class _FusedSilu(torch.autograd.Function):
    """An activation that keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)


def fused_silu(x: Tensor) -> Tensor:
    """aten::silu."""
    result: Tensor = _FusedSilu.apply(x)
    return result


def fused_root_mean_square(x: Tensor, _shape: tuple[int, ...], weight: Tensor | None, _eps: float) -> Tensor:
    """aten::_fused_rms_norm."""
    result: Tensor = _FusedNorm.apply(x, 1, weight)
    return result


def fused_layer_norm(x: Tensor, _shape: tuple[int, ...], weight: Tensor, bias: Tensor, _eps: float) -> Tensor:
    """aten::native_layer_norm."""
    result: Tensor = _FusedNorm.apply(x, 2, weight, bias)
    return result


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """Flash attention where it can: it takes no mask, and no values of another width than the keys'.

    The kernel that does takes no fewer keys than queries.
    """
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    assert not enable_gqa, "torch would write all scores out"
    bias = None
    if attn_mask is not None:
        bias = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~attn_mask, float("-inf"))
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)[0]
