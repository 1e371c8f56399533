"""How keys and values of one rank come to the others, and their gradients back: around a ring, or gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.torch_compat import all_gather_single, reduce_scatter_single

_KEYS, _GRADIENTS = 1, 2  # tags: both are on their way between the same two ranks at once


class Returns(Protocol):
    """Gradients of every rank's block on their way home."""

    def room(self, owner: int, block: Tensor) -> Tensor:
        """Zeros in the shape of the `block` of `owner`, to which this rank adds its summand of its gradient."""

    def leave(self, owner: int) -> None:
        """That summand is whole; once for each, in the order of `passing`."""

    def home(self) -> Tensor:
        """The gradient of this rank's own block, summed over the ranks."""


class Travel(Protocol):
    """Equal blocks, one of each rank, that all ranks of a group see."""

    def passing(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(owner, block) of every rank, this one first; the next is on its way while the last one is used."""

    def returning(self, dtype: torch.dtype) -> Returns:
        """To collect what a second `passing` finds, summed in `dtype`."""


@dataclass(slots=True, kw_only=True)
class _Hop:
    """A block on its way to the next rank and one from the rank before."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Blocks are passed from rank to rank (Ring attention, 2310.01889); one rank passes nothing."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def passing(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        for step in range(self.size):
            hop = self.hop(block, tag=_KEYS) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, block
            if hop is not None:
                block = hop.wait()

    def returning(self, dtype: torch.dtype) -> Returns:
        return _RingReturns(ring=self, dtype=dtype)

    def hop(self, block: Tensor, *, tag: int) -> _Hop:
        """Receives first: gloo tells that it waits behind what it sends, and one way would wait for the other."""
        assert self.group is not None
        received = torch.empty_like(block)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before, tag=tag),
            dist.P2POp(dist.isend, block, group=self.group, group_peer=after, tag=tag),
        ]
        return _Hop(sent=block, received=received, works=dist.batch_isend_irecv(operations))


@dataclass(slots=True, kw_only=True)
class _RingReturns:
    """Sums travel behind their blocks, from the first rank after the owner on, and leave the last one for home."""

    ring: Ring
    dtype: torch.dtype
    own: Tensor | None = None
    summed: Tensor | None = None
    hop: _Hop | None = None

    def room(self, owner: int, block: Tensor) -> Tensor:
        self.summed = torch.zeros_like(block, dtype=self.dtype)
        return self.summed

    def leave(self, owner: int) -> None:
        assert self.summed is not None
        if owner == self.ring.rank:
            self.own = self.summed
            return
        self._arrive(self.summed)
        self.hop = self.ring.hop(self.summed, tag=_GRADIENTS)

    def home(self) -> Tensor:
        assert self.own is not None
        self._arrive(self.own)
        return self.own

    def _arrive(self, summed: Tensor) -> None:
        """Adds what is on its way here, and lets go of what it replaced."""
        if self.hop is not None:
            summed += self.hop.wait()
            self.hop = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """All blocks are gathered before the first is used (2407.21783), and gradients scattered after the last."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def passing(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        whole = block.new_empty((self.size * block.shape[0], *block.shape[1:]))
        all_gather_single(whole, block.contiguous(), group=self.group)
        blocks = whole.chunk(self.size)
        for step in range(self.size):
            owner = (self.rank - step) % self.size
            yield owner, blocks[owner]

    def returning(self, dtype: torch.dtype) -> Returns:
        return _GatherReturns(gather=self, dtype=dtype)


@dataclass(slots=True, kw_only=True)
class _GatherReturns:
    gather: Gather
    dtype: torch.dtype
    parts: Tensor | None = None

    def room(self, owner: int, block: Tensor) -> Tensor:
        if self.parts is None:
            self.parts = block.new_zeros((self.gather.size, *block.shape), dtype=self.dtype)
        return self.parts[owner]

    def leave(self, owner: int) -> None:
        """It is where it leaves from."""

    def home(self) -> Tensor:
        """On gloo as all-to-all and a local sum: its reduce-scatter moves twice the bytes."""
        parts, self.parts = self.parts, None
        assert parts is not None
        if parts.device.type == "cpu":
            received = torch.empty_like(parts)
            dist.all_to_all_single(received, parts, group=self.gather.group)
            return received.sum(dim=0)
        result = torch.empty_like(parts[0])
        reduce_scatter_single(result, parts, group=self.gather.group)
        return result
