"""Moments of an optimizer in two bytes or one, and what they stand for.

In one byte each block of 256 neighbours in what a rank has is a largest magnitude in fp32 and numbers from -1 to 1 of
it: those of the dynamic map of 8-bit optimizers (2110.02861), or e4m3. A second moment that is not zero is never
rounded to zero, so that no update is divided by epsilon alone. What a block stands for, packed again, is the same
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.spec.optimizer import MOMENT_BLOCK, Moments

_E4M3_LARGEST = 448.0
_DECADES = 7  # of the dynamic map: a magnitude's leading zero bits say which power of ten it is below


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """`size` numbers: `codes` (size,), and `scale` of every block where they are bytes, else empty."""

    codes: Tensor
    scale: Tensor

    def part(self, start: int, stop: int) -> Packed:
        """Views of the numbers [start, stop), of which the first begins a block."""
        blocks = self.scale[start // MOMENT_BLOCK : -(-stop // MOMENT_BLOCK)] if self.scale.numel() else self.scale
        return Packed(codes=self.codes[start:stop], scale=blocks)


class Packing:
    """How numbers are packed, on one device; `signed` says that some may be negative."""

    def __init__(self, form: Moments, *, signed: bool, device: torch.device) -> None:
        self._form, self._signed = form, signed
        self._map = _map(signed, device) if form is Moments.DYNAMIC8 else None

    def pack(self, x: Tensor, into: Packed) -> None:
        """`into` stands for x (size,)."""
        if not self._form.in_blocks:
            if into.codes is not x:
                into.codes.copy_(x)
            return
        blocks = functional.pad(x, (0, -x.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
        into.scale.copy_(blocks.abs().amax(dim=1))
        # Of the least magnitudes, which would divide by nothing, zero is left.
        scale = into.scale.to(x.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        shares = (blocks / scale[:, None]).view(-1)[: x.numel()]
        codes = self._nearest(shares)
        into.codes.copy_(codes if self._signed else torch.maximum(codes, (shares > 0.0).to(torch.uint8)))

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """What it stands for, (size,); the numbers themselves where nothing is packed."""
        if not self._form.in_blocks:
            return packed.codes.to(dtype)
        size = packed.codes.numel()
        shares = functional.pad(self._shares(packed.codes, dtype), (0, -size % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
        return (shares * packed.scale.to(dtype)[:, None]).view(-1)[:size]

    def _nearest(self, shares: Tensor) -> Tensor:
        if self._map is None:
            inside = (shares * _E4M3_LARGEST).clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
            return inside.to(torch.float8_e4m3fn).view(torch.uint8)
        return self._map.nearest(shares)

    def _shares(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        if self._map is None:
            return codes.view(torch.float8_e4m3fn).to(dtype) / _E4M3_LARGEST
        return self._map.numbers.to(dtype).index_select(0, codes.to(torch.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Map:
    """The numbers of a dynamic map and what is halfway between neighbours, in fp64.

    Numbers of fp32 that share their upper sixteen bits lie between two halves: `first` is the code of the least of
    them, and of those above `half`, one of the sixteen bits' own, the next one is nearer.
    """

    numbers: Tensor
    between: Tensor
    first: Tensor
    half: Tensor

    def nearest(self, x: Tensor) -> Tensor:
        """Codes of the numbers nearest to x, halfway between two the smaller one's; what is no number has the last."""
        if x.dtype is not torch.float32:
            return torch.bucketize(x, self.between.to(x.dtype), out_int32=True).to(torch.uint8)
        upper = (x.contiguous().view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        return self.first.index_select(0, upper) + (x > self.half.index_select(0, upper))


@cache
def _map(signed: bool, device: torch.device) -> _Map:
    numbers = torch.tensor(dynamic_map(signed), dtype=torch.float64)
    between = (numbers[1:] + numbers[:-1]) / 2.0
    halves = between.to(torch.float32)
    upper = torch.arange(2**16, dtype=torch.int64)
    ends = torch.stack([upper << 16, (upper << 16) + 0xFFFF]).to(torch.int32).view(torch.float32)
    least = torch.where(ends.isnan(), torch.inf, ends).amin(dim=0)
    first = torch.bucketize(least, halves)
    half = torch.cat([halves, torch.tensor([torch.inf])])[first]
    return _Map(
        numbers=numbers.to(device),
        between=between.to(device),
        first=first.to(device, torch.uint8),
        half=half.to(device),
    )


def empty(size: int, *, form: Moments, device: torch.device, wide: torch.dtype) -> Packed:
    """`size` zeros, whatever their sign; in `wide` where nothing is packed."""
    dtype = torch.uint8 if form.in_blocks else torch.bfloat16 if form is Moments.BF16 else wide
    blocks = -(-size // MOMENT_BLOCK) if form.in_blocks else 0
    return Packed(
        codes=torch.zeros(size, dtype=dtype, device=device),
        scale=torch.zeros(blocks, dtype=torch.float32, device=device),
    )


@cache
def dynamic_map(signed: bool) -> Sequence[float]:
    """The numbers of the dynamic map in their order: zero, one, and in each decade below one the middles of as many
    equal parts of [0.1, 1] as the bits that are left tell apart (2110.02861, section 1.3). Where they have a sign, one
    and less one take the places of the largest middles, so that a block's largest stays what it is.
    """
    magnitudes = []
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        middles = (0.1 + 0.9 * (part + 0.5) / parts for part in range(parts))
        magnitudes += [middle * 10.0 ** (decade - _DECADES + 1) for middle in middles]
    magnitudes = [*magnitudes[:-1], 1.0] if signed else [*magnitudes, 1.0]
    return tuple(sorted([0.0, *magnitudes, *((-value for value in magnitudes) if signed else ())]))
