"""Numbers that travel in eight bits, four or one, each rank keeping what rounding left out for the next time.

A reduction is an all-to-all of rounded parts and a sum in full precision on the rank that owns each part; where every
rank needs all of it, a gather of the rounded sums follows. What rounding leaves out of what a rank sends is added to
what it sends next (error feedback, 1901.09847), so that sums over steps are never further from the exact ones than one
rounding. A part of n elements travels as n + 4 bytes, numbers in e4m3 or whole ones and their scale, a power of two in
fp32; in four bits as 66 bytes for 128 elements, whose scale is of two; or as signs, eight to a byte, and their mean
size. Any backend carries them: they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.torch_compat import all_gather_single
from meshwright.parallel.wire import Wire
from meshwright.spec.synchronize import BLOCK, CACHED_ELEMENTS, PIECE_ELEMENTS, PIECES, SCALE_BYTES

_TOGETHER = 0x0102040810204080


class Rounding:
    """One place where `parts` parts of equal size, of `size` elements in all, are rounded time and again.

    `left` (parts, n) is what is still owed to the others; elements that fill parts up are zero.
    """

    def __init__(self, size: int, *, parts: int, dtype: torch.dtype, device: torch.device, wire: Wire) -> None:
        self._wire, self._bytes = wire, wire.packing.part_bytes(-(-size // parts))
        each = wire.packing.filled(-(-size // parts))
        self._head = self._bytes - each // wire.together
        self.left = torch.zeros(parts, each, dtype=dtype, device=device)
        least = CACHED_ELEMENTS if device.type == "cpu" else PIECE_ELEMENTS
        self._piece = max(least, -(-each // PIECES // BLOCK) * BLOCK)

    def pack(self, flat: Tensor) -> Tensor:
        """Bytes (parts, those of a part) of flat (size,) with what was left before; the rest is left."""
        self.left.view(-1)[: flat.numel()].add_(flat)
        packed = torch.empty(self.left.shape[0], self._bytes, dtype=torch.uint8, device=flat.device)
        spare = self._spare()
        for part, row in zip(self.left, packed, strict=True):
            self._pack(part, row, spare=spare)
        return packed

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows, n) from bytes (rows, those of a part)."""
        found = torch.empty(packed.shape[0], self.left.shape[1], dtype=dtype, device=packed.device)
        for row, out in zip(packed, found, strict=True):
            for shares, numbers, scale in self._pieces(out, row):
                self._wire.read(numbers, shares)
                self._blocks(shares).mul_(scale)
        return found

    def total(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """(n,): the sum of what the rows of `packed` hold, in their order."""
        found, spare = self.unpack(packed[:1], dtype)[0], self._spare().to(dtype)
        for row in packed[1:]:
            for sums, numbers, scale in self._pieces(found, row):
                shares = spare[: sums.numel()]
                self._wire.read(numbers, shares)
                self._blocks(sums).addcmul_(self._blocks(shares), scale)
        return found

    def _pack(self, part: Tensor, row: Tensor, *, spare: Tensor) -> None:
        """`row` is what travels of `part`, of which the rest is left."""
        largest = []
        for owed in part.split(self._piece):
            sizes = torch.abs(owed, out=spare[: owed.numel()])
            largest.append(self._blocks(sizes).amax(dim=1))
        found = torch.cat(largest)
        scale = self._wire.scale(found if self._wire.has_blocks else found.amax(dim=0, keepdim=True))
        row[: self._head].copy_(scale.view(torch.uint8))
        for owed, numbers, scales in self._pieces(part, row):
            shares = spare[: owed.numel()]
            torch.mul(self._blocks(owed), scales.reciprocal(), out=self._blocks(shares))
            self._wire.write(shares, numbers)
            self._blocks(owed).addcmul_(self._blocks(shares), scales, value=-1.0)

    def _pieces(self, part: Tensor, row: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pieces of `part` (n,), the bytes of their numbers in `row`, and the scales of their blocks (blocks, 1)."""
        numbers = row[self._head :].split(self._piece // self._wire.together)
        scales = row[: self._head].clone().view(self._wire.scale_dtype).to(part.dtype).unsqueeze(1)
        each = scales.split(self._piece // BLOCK) if self._wire.has_blocks else repeat(scales)
        return zip(part.split(self._piece), numbers, each, strict=False)

    def _blocks(self, x: Tensor) -> Tensor:
        """x (n,) as (blocks, elements): those with one scale together."""
        return x.view(-1, BLOCK) if self._wire.has_blocks else x.view(1, -1)

    def _spare(self) -> Tensor:
        """Room for a piece."""
        return self.left.new_empty(min(self._piece, self.left.shape[1]))


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

    def total(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """(n,): the sum of what the rows of `packed` hold."""
        return self.unpack(packed, dtype).sum(dim=0)


class CompressedReduction:
    """All-reduce of a flat tensor in the bits of `wire`, or as signs where there is none: `start` sends its parts,
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
        self._packed, dtype = None, self.sent.left.dtype
        self._packed = self.summed.pack(self.sent.total(self._received, dtype))
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
