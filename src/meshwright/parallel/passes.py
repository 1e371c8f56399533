"""Passes: one microbatch forward or backward through one stage, and what the stage's gradients do around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from meshwright import schedule
from meshwright.parallel.slices import SliceStore
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.synchronize import Synchronizer
from meshwright.spec.report import LineName
from meshwright.spec.span import Recorder

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Passes:
    """What one stage does in each pass, with its spans: StageCalls. `split` are the passes whose backward has two
    halves, both under the name of backward; `count` is how many passes a step has. `slices`, where microbatches are
    cut, says where else a backward begins; pass i is then a slice of microbatch i // slices.number.
    """

    def __init__(
        self,
        *,
        stage: int,
        synchronizer: Synchronizer,
        weights: WeightGradients | None,
        split: frozenset[int],
        count: int,
        recorder: Recorder,
        slices: SliceStore | None = None,
    ) -> None:
        assert weights is not None or not split, "a stage that splits backwards keeps what they put off"
        self._stage, self._synchronizer, self._weights, self._split = stage, synchronizer, weights, split
        self._count, self._recorder, self._start = count, recorder, 0.0
        self._slices = slices

    def before_forward(self, index: int) -> None:
        if self._weights is not None:
            self._weights.before_forward(splits=index in self._split)
        if self._slices is not None:
            self._slices.begin(index)
        self._start = time.perf_counter()

    def after_forward(self, index: int) -> None:
        self._synchronizer.after_forward(last=index == self._count - 1)
        self._record(LineName.FORWARD, self._start, index)

    def backward(self, index: int, output: Tensor, gradient: Tensor | None, *, whole: bool, last: bool) -> None:
        start = time.perf_counter()
        if whole:
            self._synchronizer.before_backward(last=last)
        else:
            self._synchronizer.before_input()
        if self._weights is not None:
            self._weights.before_forward(splits=not whole)  # what a checkpoint computes again is that forward
        with nullcontext() if whole or self._weights is None else self._weights.putting_off(index):
            made, above = ([], []) if self._slices is None else self._slices.gradients(index)
            torch.autograd.backward([output, *made], [gradient, *above])
        self._record(LineName.BACKWARD, start, index)

    def weights(self, index: int, *, last: bool) -> None:
        start = time.perf_counter()
        assert self._weights is not None
        self._synchronizer.before_weights(last=last)
        self._weights.form(index, done=self._synchronizer.unit_done)
        self._synchronizer.after_weights()
        self._record(LineName.BACKWARD, start, index)

    def reduce(self) -> None:
        start = time.perf_counter()
        self._synchronizer.after_backward()
        self._record(LineName.GRADIENTS, start, -1)

    def _record(self, name: LineName, start: float, index: int) -> None:
        microbatch = index if self._slices is None else index // self._slices.number
        seconds = time.perf_counter() - start
        self._recorder.record(name, start, seconds, stage=self._stage, microbatch=microbatch)


def split_passes(table: schedule.Table, stage: int) -> frozenset[int]:
    """Microbatches whose backward through `stage` has two halves."""
    return frozenset(
        action.microbatch
        for row in table
        for action in row
        if action.stage == stage and action.work is schedule.Work.INPUT
    )
