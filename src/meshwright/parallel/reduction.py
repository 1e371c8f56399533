"""How one bucket of gradients becomes its sum over the ranks: whole, in eight bits, or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.compress import CompressedReduction
from meshwright.parallel.cosine_reduction import DeMoReduction
from meshwright.parallel.low_rank_reduction import AcpSgdReduction, PowerSgdReduction
from meshwright.parallel.sparse_reduction import TopKReduction
from meshwright.parallel.wire import Wire
from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK


class Reduction(Protocol):
    """Sums a flat tensor over ranks in two turns, so that several are under way at once.

    Every rank calls all three in one order of buckets. `state` is what lasts from step to step: live tensors, of which
    zeros say that nothing was sent before.
    """

    @property
    def state(self) -> tuple[Tensor, ...]: ...

    def start(self, flat: Tensor, *, step: int) -> None:
        """What is sent of `flat` in step `step` is on its way."""

    def turn(self) -> None:
        """Once it has arrived: what follows it is on its way, where something does."""

    def finish(self, flat: Tensor) -> None:
        """`flat` holds the sum, the same bits on every rank."""


class WholeReduction:
    """All-reduce of every element in `dtype`, over one group after another."""

    state: tuple[Tensor, ...] = ()

    def __init__(self, *, groups: Sequence[dist.ProcessGroup], dtype: torch.dtype | None) -> None:
        self._groups, self._dtype = tuple(groups), dtype
        self._wire: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, flat: Tensor, *, step: int) -> None:
        self._wire = flat if self._dtype is None else flat.to(self._dtype)
        self._work = dist.all_reduce(self._wire, group=self._groups[0], async_op=True)

    def turn(self) -> None:
        """Nothing: further groups are summed over at the end."""

    def finish(self, flat: Tensor) -> None:
        assert self._wire is not None
        assert self._work is not None
        self._work.wait()
        for group in self._groups[1:]:
            dist.all_reduce(self._wire, group=group)
        if self._wire is not flat:
            flat.copy_(self._wire)
        self._wire = self._work = None


class ReductionInTurn:
    """Over one group after another, each with what it owes: the last ones begin when the first is done."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._first, *self._rest = reductions
        self._step = 0

    @property
    def state(self) -> tuple[Tensor, ...]:
        return tuple(x for reduction in (self._first, *self._rest) for x in reduction.state)

    def start(self, flat: Tensor, *, step: int) -> None:
        self._step = step
        self._first.start(flat, step=step)

    def turn(self) -> None:
        self._first.turn()

    def finish(self, flat: Tensor) -> None:
        self._first.finish(flat)
        for reduction in self._rest:
            reduction.start(flat, step=self._step)
            reduction.turn()
            reduction.finish(flat)


class LateReduction:
    """Another reduction from step `start_step` on, and a whole one before."""

    def __init__(self, then: Reduction, *, whole: Reduction, start_step: int) -> None:
        self._then, self._whole, self._start_step = then, whole, start_step
        self._chosen = whole

    @property
    def state(self) -> tuple[Tensor, ...]:
        return self._then.state

    def start(self, flat: Tensor, *, step: int) -> None:
        self._chosen = self._whole if step < self._start_step else self._then
        self._chosen.start(flat, step=step)

    def turn(self) -> None:
        self._chosen.turn()

    def finish(self, flat: Tensor) -> None:
        self._chosen.finish(flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """How gradients travel: in `dtype` where it is not their own, in the eight bits of `wire`, or compressed."""

    dtype: torch.dtype | None = None
    wire: Wire | None = None
    compression: Compression | None = None

    def reduction(self, like: Tensor, shapes: Sequence[torch.Size], groups: Sequence[dist.ProcessGroup]) -> Reduction:
        """What sums tensors such as `like`, in which tensors of `shapes` lie one after another."""
        if self.wire is not None:
            rounded = [CompressedReduction(like, group=group, wire=self.wire) for group in groups]
            return ReductionInTurn(rounded) if len(rounded) > 1 else rounded[0]
        whole = WholeReduction(groups=groups, dtype=self.dtype)
        if self.compression is None:
            return whole
        assert len(groups) == 1, "what compression leaves of gradients is owed to the ranks of one axis"
        then = _compressed(self.compression, like, shapes, group=groups[0])
        return LateReduction(then, whole=whole, start_step=self.compression.start_step)


def _compressed(
    compression: Compression, like: Tensor, shapes: Sequence[torch.Size], *, group: dist.ProcessGroup
) -> Reduction:
    match compression:
        case PowerSgd():
            return PowerSgdReduction(like, shapes, group=group, rank=compression.rank)
        case AcpSgd():
            return AcpSgdReduction(like, shapes, group=group, rank=compression.rank)
        case TopK():
            return TopKReduction(like, group=group, share=compression.share)
        case DeMo():
            return DeMoReduction(like, group=group, spec=compression)
        case OneBit():
            return CompressedReduction(like, group=group, wire=None)
