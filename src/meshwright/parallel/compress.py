"""Gradients that travel in eight bits or one, each rank keeping what rounding left out for the next time.

A reduction is an all-to-all of rounded parts and a sum in full precision on the rank that owns each part; where every
rank needs all of it, a gather of the rounded sums follows. What rounding leaves out of what a rank sends is added to
what it sends next (error feedback, 1901.09847), so that sums over steps are never further from the exact ones than one
rounding. A part of n elements travels as n + 4 bytes: numbers in e4m3 or whole ones, and their scale, a power of two in
fp32; as signs, eight to a byte, and their mean size. Any backend carries them: they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.torch_compat import all_gather_single
from meshwright.spec.synchronize import SCALE_BYTES

_TOGETHER = 0x0102040810204080
_LEAST = 2.0**-100  # the least largest magnitude that a scale is made of


class Wire(StrEnum):
    """Eight bits of a number: e4m3, whose steps grow with it, or whole numbers, whose steps are all alike."""

    E4M3 = "e4m3"
    INT8 = "int8"

    @property
    def largest(self) -> float:
        return 448.0 if self is Wire.E4M3 else 127.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Wire.E4M3 else torch.int8


class Rounding:
    """One place where `parts` parts of equal size, of `size` elements in all, are rounded time and again.

    `left` (parts, n) is what is still owed to the others; elements that fill the last part up are zero.
    """

    def __init__(self, size: int, *, parts: int, dtype: torch.dtype, device: torch.device, wire: Wire) -> None:
        self._wire = wire
        self.left = torch.zeros(parts, -(-size // parts), dtype=dtype, device=device)

    def pack(self, flat: Tensor) -> Tensor:
        """Bytes (parts, n + 4) of flat (size,) with what was left before; the rest is left."""
        self.left.view(-1)[: flat.numel()].add_(flat)
        largest = self.left.abs().amax(dim=1, keepdim=True).clamp(min=_LEAST)
        scale = torch.exp2(torch.ceil(torch.log2(largest / self._wire.largest))).to(torch.float32)
        packed = torch.cat((scale.view(torch.uint8), self._numbers(scale).view(torch.uint8)), dim=1)
        self.left.sub_(self.unpack(packed, flat.dtype))
        return packed

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """(parts, n) from bytes (parts, n + 4)."""
        return packed[:, SCALE_BYTES:].contiguous().view(self._wire.dtype).to(dtype).mul_(_scale(packed).to(dtype))

    def _numbers(self, scale: Tensor) -> Tensor:
        """What is left, in eight bits of `scale` (parts, 1) each."""
        shares = self.left / scale.to(self.left.dtype)
        return (shares if self._wire is Wire.E4M3 else shares.round_()).to(self._wire.dtype)


class Signs:
    """As Rounding, of which nothing but signs and the mean size of a part's elements is sent (1901.09847)."""

    def __init__(self, size: int, *, parts: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size, part = size, -(-size // parts)
        self.left = torch.zeros(parts, part, dtype=dtype, device=device)
        held = (size - part * torch.arange(parts, device=device)).clamp(0, part)
        self._held = held.clamp(min=1).to(dtype).unsqueeze(1)
        signs = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
        self._signs = torch.empty(256, 8, dtype=dtype, device=device)
        self._signs[_bytes_of(signs.bool()).view(-1).long()] = (2 * signs - 1).to(dtype)

    def pack(self, flat: Tensor) -> Tensor:
        """Bytes (parts, n / 8 + 4) of flat (size,) with what was left before; the rest is left."""
        owed = self.left.view(-1)[: self._size]
        owed.add_(flat)
        scale = (self.left.abs().sum(dim=1, keepdim=True) / self._held).to(torch.float32)
        positive = torch.nn.functional.pad(self.left >= 0.0, (0, -self.left.shape[1] % 8))
        packed = torch.cat((scale.view(torch.uint8), _bytes_of(positive)), dim=1)
        owed.sub_(self.unpack(packed, flat.dtype).view(-1)[: self._size])
        return packed

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """(parts, n) from bytes (parts, n / 8 + 4)."""
        signs = self._signs[packed[:, SCALE_BYTES:].int()].flatten(start_dim=1)[:, : self.left.shape[1]]
        return (signs * _scale(packed).to(signs.dtype)).to(dtype)


class CompressedReduction:
    """All-reduce of a flat tensor in eight bits, or as signs where there is no `wire`: `start` sends its parts,
    `finish` gives every rank the sum.

    The second half, a gather of the rounded sums, sets out in `turn`, or in `advance` once the first has arrived.
    """

    def __init__(self, like: Tensor, *, group: dist.ProcessGroup, wire: Wire | None) -> None:
        self._group, self._size = group, like.numel()
        self.sent = _rounding(like.numel(), like, parts=group.size(), wire=wire)
        self.summed = _rounding(self.sent.left.shape[1], like, parts=1, wire=wire)
        self._received: Tensor | None = None
        self._everyone: Tensor | None = None
        self._packed: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def state(self) -> tuple[Tensor, ...]:
        return self.sent.left, self.summed.left

    def start(self, flat: Tensor, *, step: int = 0) -> None:
        """Rounded parts of `flat` are on their way to their owners."""
        self._packed = self.sent.pack(flat)
        self._received = torch.empty_like(self._packed)
        self._work = dist.all_to_all_single(self._received, self._packed, group=self._group, async_op=True)

    def advance(self) -> bool:
        """What has arrived is summed and on its way to everyone; nothing happens while it has not. Whether all of it
        has."""
        if self._work is None or not self._work.is_completed():
            return self._work is None
        if self._received is None:
            return True
        self.turn()
        return False

    def finish(self, flat: Tensor) -> None:
        """`flat` holds the sum, the same bits on every rank."""
        flat.copy_(self.result())

    def result(self) -> Tensor:
        """The sum, the same bits on every rank."""
        if self._received is not None:
            self.turn()
        assert self._work is not None
        assert self._everyone is not None
        self._work.wait()
        total = self.summed.unpack(self._everyone, self.sent.left.dtype).view(-1)[: self._size]
        self._everyone = self._packed = self._work = None
        return total

    def turn(self) -> None:
        """Sums are on their way to everyone."""
        assert self._work is not None
        assert self._received is not None
        self._work.wait()
        dtype = self.sent.left.dtype
        self._packed = self.summed.pack(self.sent.unpack(self._received, dtype).sum(dim=0))
        self._received = None
        self._everyone = self._packed.new_empty(self._group.size(), self._packed.shape[1])
        self._work = all_gather_single(self._everyone, self._packed, group=self._group, async_op=True)


def _bytes_of(bits: Tensor) -> Tensor:
    """(rows, n / 8) of (rows, n) truths, eight to a byte: a product that brings the eight bytes of a number together in
    its highest one."""
    return (bits.contiguous().view(torch.int64) * _TOGETHER >> 56).to(torch.uint8)


def _scale(packed: Tensor) -> Tensor:
    """(parts, 1). A slice of one row passes for contiguous whatever its stride, and cannot be viewed."""
    return packed[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _rounding(size: int, like: Tensor, *, parts: int, wire: Wire | None) -> Rounding | Signs:
    if wire is None:
        return Signs(size, parts=parts, dtype=like.dtype, device=like.device)
    return Rounding(size, parts=parts, dtype=like.dtype, device=like.device, wire=wire)


def sent_elements(parameters: Sequence[Tensor], *, ranks: int) -> int:
    """Elements of what FSDP2 scatters for a group of `parameters` (local ones): dim 0 filled up to whole shares."""
    return sum(-(-x.shape[0] // ranks) * ranks * (x.numel() // max(x.shape[0], 1)) for x in parameters)
