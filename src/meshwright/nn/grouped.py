"""Products of stacked matrices, each with the rows that are its own, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# One kernel for the products of all experts; torch has it since 2.10.
_kernel: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None)
_ROW_BYTES = 16  # rows of its operands begin at multiples of this
# Types of devices on which it is one: nvidia's and AMD's have one name.
DEVICES = frozenset({"cuda"})

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def suits_grouped(rows: Tensor, sizes: tuple[int, int]) -> bool:
    """Whether the one kernel is the faster way: bf16 on an accelerator, rows of aligned bytes."""
    aligned = all(size * rows.element_size() % _ROW_BYTES == 0 for size in sizes)
    return _kernel is not None and rows.device.type in DEVICES and rows.dtype is torch.bfloat16 and aligned


def grouped_product(rows: Tensor, stacked: Tensor, ends: Tensor) -> Tensor:
    """(n, outputs) of rows (n, inputs), each times the transpose of its own of `stacked` (matrices, outputs, inputs).

    Rows of matrix i are before `ends[i]`, int32, and behind those of the matrix before.
    """
    result: Tensor = _Dense.apply(multiply_grouped(rows, stacked.transpose(-2, -1), ends))
    return result


def multiply_grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """(n, k) from (n, m) and matrices (e, m, k), or all (e, m, k) from (m, n) and (n, k): `ends` are along n."""
    assert _kernel is not None
    return _kernel(left, right, offs=ends)


class _Dense(torch.autograd.Function):
    """x as it is; its gradient in memory of its own: the kernel refuses expanded ones."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
