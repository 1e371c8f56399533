"""Products of eight-bit numbers by an accelerator's own units (2209.05433), with scales of tensors or rows.

They round as the emulation on processors does, bit by bit, and differ from it in the order of sums. Sides that the
units cannot take are filled up with zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.quantized import LEAST, Format, Multiply, Operand, block_scale, emulated, largest_of
from meshwright.parallel.torch_compat import multiply_scaled

_MULTIPLE = 16  # of the sides that lie together
_STORED = {Format.E4M3: torch.float8_e4m3fn, Format.E5M2: torch.float8_e5m2}


def multiplier(device: torch.device) -> Multiply:
    """How `device` multiplies rounded operands: by units of its own where it is an accelerator."""
    return scaled if device.type == "cuda" else emulated


def scaled(pairs: list[tuple[Tensor, Operand]], group: dist.ProcessGroup | None, *, dtype: torch.dtype) -> Tensor:
    """A Multiply of the numbers in eight bits, each operand with one scale or one for every row."""
    wide = [x.to(torch.float32) for x, _ in pairs]
    operands = [how for _, how in pairs]
    largest = largest_of(wide, operands, group)
    (left, left_scale), (right, right_scale) = (
        coded(x, how, largest=value) for x, how, value in zip(wide, operands, largest, strict=True)
    )
    rows, columns = left.shape[0], right.shape[0]
    more, deep = -columns % _MULTIPLE, -left.shape[1] % _MULTIPLE
    if right_scale.dim():
        right_scale = functional.pad(right_scale, (0, 0, 0, more), value=1.0)
    found = multiply_scaled(
        _filled(left, columns=deep, rows=0),
        _filled(right, columns=deep, rows=more),
        left_scale=left_scale,
        right_scale=right_scale,
        dtype=dtype,
    )
    return found[:rows, :columns]


def coded(x: Tensor, how: Operand, *, largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (rows, contracted) in fp32 as eight-bit numbers that lie together, and their scale, () or (rows, 1)."""
    if how.block is None:
        assert largest is not None
        scale = largest.clamp(min=LEAST) / how.form.largest
    else:
        assert how.block == (1, None), "units multiply scales of tensors and of rows alone"
        scale = block_scale(x.abs().amax(dim=1, keepdim=True), how, largest)
    inside = (x / scale).clamp(-how.form.largest, how.form.largest)
    return inside.to(_STORED[how.form], memory_format=torch.contiguous_format), scale


def _filled(codes: Tensor, *, columns: int, rows: int) -> Tensor:
    """More zeros at the end of both dims; torch fills bytes and not numbers of eight bits."""
    if not (columns or rows):
        return codes
    return functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)
