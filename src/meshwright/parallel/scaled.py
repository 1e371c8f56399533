"""Products of eight-bit numbers by an accelerator's own units (2209.05433), with scales of tensors or rows.

They round as the emulation on processors does, bit by bit, and differ from it in the order of sums. Sides that the
units cannot take are filled up with zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.quantized import LEAST, Format, Multiply, Operand, block_scale, emulated, largest_of, magnitude
from meshwright.parallel.torch_compat import multiply_scaled

_MULTIPLE = 16  # of the sides that lie together
_AT_ONCE = 2**24  # numbers that are in fp32 on their way to eight bits
_STORED = {Format.E4M3: torch.float8_e4m3fn, Format.E5M2: torch.float8_e5m2}


def multiplier(device: torch.device) -> Multiply:
    """How `device` multiplies rounded operands: by units of its own where it is an accelerator."""
    return emulated if device.type == "cpu" else scaled


def scaled(pairs: list[tuple[Tensor, Operand]], group: dist.ProcessGroup | None, *, dtype: torch.dtype) -> Tensor:
    """A Multiply of the numbers in eight bits, each operand with one scale or one for every row."""
    largest = largest_of([x for x, _ in pairs], [how for _, how in pairs], group)
    (left, left_scale), (right, right_scale) = (
        coded(x, how, largest=value) for (x, how), value in zip(pairs, largest, strict=True)
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
    """x (rows, contracted) as eight-bit numbers that lie together, and their scale in fp32, () or (rows, 1).

    Some rows at a time are divided by it in fp32, so that of a whole matrix there is never such a copy; where the
    layer compiles it is one kernel.
    """
    if how.block is None:
        assert largest is not None
        scale = largest.clamp(min=LEAST) / how.form.largest
    else:
        assert how.block == (1, None), "units multiply scales of tensors and of rows alone"
        scale = block_scale(magnitude(x, dim=1), how, largest)
    if torch.compiler.is_compiling() or x.numel() <= _AT_ONCE:
        return _code(x, scale, how.form), scale
    codes = x.new_empty(x.shape, dtype=_STORED[how.form])
    step = max(1, _AT_ONCE // x.shape[1])
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        codes[rows] = _code(x[rows], scale[rows] if scale.dim() else scale, how.form)
    return codes, scale


def _code(x: Tensor, scale: Tensor, form: Format) -> Tensor:
    inside = (x.to(torch.float32) / scale).clamp(-form.largest, form.largest)
    return inside.to(_STORED[form], memory_format=torch.contiguous_format)


def _filled(codes: Tensor, *, columns: int, rows: int) -> Tensor:
    """More zeros at the end of both dims; torch fills bytes and not numbers of eight bits."""
    if not (columns or rows):
        return codes
    return functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)
