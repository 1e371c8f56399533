"""Wire: numbers of eight bits or four that travel in the place of wide ones.

e4m3 has steps that grow with a number; int8 and int4 are whole numbers, whose steps are all alike. Bytes are made by
arithmetic that every device has, and are the same on all of them: no cast to eight bits is asked for, which processors
do slowly and older accelerators lack.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from meshwright.spec.cluster import Precision
from meshwright.spec.synchronize import BLOCK, PACKINGS, Packing

LEAST = 2.0**-100  # the least largest magnitude that a scale is made of
_HALF_OVER_E4M3 = 2.0**8  # halves have five bits of exponent, whose bias is eight more than that of e4m3's four
_HIGH = 16.0  # what the second of the two numbers of a byte counts


class Wire(StrEnum):
    """What a number becomes: a share of its scale, between -`largest` and `largest`.

    In eight bits a part has one scale, a power of two in fp32; in four each block has one in bf16. The two numbers of a
    byte lie half a block apart.
    """

    E4M3 = "e4m3"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def largest(self) -> float:
        return {"e4m3": 448.0, "int8": 127.0, "int4": 7.0}[self.value]

    @property
    def packing(self) -> Packing:
        return PACKINGS[{"e4m3": Precision.FP8, "int8": Precision.INT8, "int4": Precision.INT4}[self.value]]

    @property
    def has_blocks(self) -> bool:
        """Every block has a scale of its own."""
        return self is Wire.INT4

    @property
    def together(self) -> int:
        """Numbers in a byte."""
        return 2 if self is Wire.INT4 else 1

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.has_blocks else torch.float32

    def scale(self, largest: Tensor) -> Tensor:
        """Scales as they travel, of parts or blocks whose largest magnitudes are these."""
        share = largest.clamp(min=LEAST) / self.largest
        return (share if self.has_blocks else torch.exp2(torch.ceil(torch.log2(share)))).to(self.scale_dtype)

    def write(self, shares: Tensor, out: Tensor) -> None:
        """`out` (bytes,) is what travels of `shares` (n,), which afterwards are what it says."""
        if self is Wire.E4M3:
            _write_e4m3(shares, out.view(torch.int8))
            return
        shares.round_()
        if self is Wire.INT4:
            low, high = shares.view(-1, 2, BLOCK // 2).unbind(1)
            out.view(torch.int8).view(low.shape).copy_(torch.add(low, high, alpha=_HIGH))
        else:
            out.view(torch.int8).copy_(shares)

    def read(self, packed: Tensor, out: Tensor) -> None:
        """`out` (n,) are the shares that were written as `packed` (bytes,)."""
        numbers = packed.view(torch.int8)
        if self is Wire.INT8:
            out.copy_(numbers)
        elif self is Wire.INT4:
            low, high = out.view(-1, 2, BLOCK // 2).unbind(1)
            low.copy_(numbers.view(low.shape))
            torch.mul(low, 1.0 / _HIGH, out=high).round_()
            low.sub_(high, alpha=_HIGH)
        else:
            bits = numbers.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
            out.copy_(bits.view(torch.float16)).mul_(_HALF_OVER_E4M3)


def _write_e4m3(shares: Tensor, out: Tensor) -> None:
    """By way of a half, whose mantissa is rounded from ten bits to three, halfway away from zero."""
    half = shares.mul_(1.0 / _HALF_OVER_E4M3).to(torch.float16)
    bits = half.view(torch.int16)
    bits.add_(64).bitwise_and_(~127)
    shares.copy_(half).mul_(_HALF_OVER_E4M3)
    sign = (bits >> 1).bitwise_and_(0x4000)
    out.copy_(bits.bitwise_or_(sign).bitwise_right_shift_(7))
