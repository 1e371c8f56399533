"""A mean over learners that travels while its ranks go on training: one collective, or two of rounded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.compress import CompressedReduction
from meshwright.parallel.outer.among import Some, rounded_mean
from meshwright.parallel.wire import Wire
from meshwright.spec.cluster import Precision

DTYPES = {Precision.FP64: torch.float64, Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}
_WIRES = {Precision.INT8: Wire.INT8, Precision.FP8: Wire.E4M3, Precision.INT4: Wire.INT4}


class Average(Protocol):
    """One mean at a time: what `start` is given is its own from then on."""

    @property
    def left(self) -> tuple[Tensor, ...]:
        """What rounding has left to be sent with the next ones; live tensors."""

    def among(self, members: Sequence[int]) -> None:
        """The next means are of places `members` of the group, one of which this rank has; of all at first. What some
        give waits until it is asked for."""

    def start(self, flat: Tensor) -> None: ...

    def advance(self) -> bool:
        """Called between steps: what can go on without waiting goes on. Whether it is all there."""

    def finish(self) -> Tensor:
        """The mean of what every learner gave, the same bits on all of them. Waits for it."""


def build_average(like: Tensor, *, group: dist.ProcessGroup, precision: Precision) -> Average:
    """A mean of tensors like `like`, which is flat, over `group`; of one rank nothing is sent, and nothing rounded."""
    if group.size() == 1:
        return PlainAverage(group=group, dtype=like.dtype)
    if precision in _WIRES:
        return RoundedAverage(like, group=group, wire=_WIRES[precision])
    return PlainAverage(group=group, dtype=DTYPES[precision])


class PlainAverage:
    """Summed in `dtype` by one all-reduce, or of some of the group on a ring."""

    left: tuple[Tensor, ...] = ()

    def __init__(self, *, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._sum: Tensor | None = None
        self._like: torch.dtype = dtype
        self._work: dist.Work | None = None
        self._some: Some | None = None

    def among(self, members: Sequence[int]) -> None:
        self._some = Some.of(members, group=self._group)

    def start(self, flat: Tensor) -> None:
        assert self._sum is None, "one mean at a time"
        self._like = flat.dtype
        self._sum = flat.to(self._dtype)
        if self._some is None:
            self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def advance(self) -> bool:
        """One collective goes by itself."""
        return self._work is None or self._work.is_completed()

    def finish(self) -> Tensor:
        assert self._sum is not None
        if self._some is not None:
            self._some.add_up(self._sum)
        elif self._work is not None:
            self._work.wait()
        mean = self._sum.to(self._like).div_(self._group.size() if self._some is None else self._some.count)
        self._sum = self._work = None
        return mean


class RoundedAverage:
    """Eight or four bits of each number, and what rounding left kept for the next time (1901.09847), whoever meets
    then."""

    def __init__(self, like: Tensor, *, group: dist.ProcessGroup, wire: Wire) -> None:
        self._reduction = CompressedReduction(like, group=group, wire=wire)
        self._group, self._wire = group, wire
        self._some: Some | None = None
        self._given: Tensor | None = None

    @property
    def left(self) -> tuple[Tensor, ...]:
        return self._reduction.state

    def among(self, members: Sequence[int]) -> None:
        self._some = Some.of(members, group=self._group)

    def start(self, flat: Tensor) -> None:
        if self._some is None:
            self._reduction.start(flat)
        else:
            self._given = flat

    def advance(self) -> bool:
        return self._some is None and self._reduction.advance()

    def finish(self) -> Tensor:
        if self._some is None:
            return self._reduction.result().div_(self._group.size())
        assert self._given is not None
        given, self._given = self._given, None
        return rounded_mean(given, self._some, reduction=self._reduction, wire=self._wire)
