"""Plain data parallel: gradients live in buckets that are summed over the ranks while backward goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Gradients of `parameters` as views of one flat tensor; `waiting` of them are not ready in the last backward."""

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    waiting: int = 0
    wire: Tensor | None = None
    work: list[dist.Work] = field(default_factory=list)


class BucketedGradients:
    """Gradients of parameters that every rank of `groups` holds alike: summed once a step, in `dtype` (PyTorch
    Distributed, 2006.15704).

    Gradients add up in place over microbatches. In the last backward a bucket is sent as soon as all before it are
    sent and all its gradients are ready, so that every rank sends in one order. Distributed tensors are summed by
    their local parts. No group means that there is no other rank, and then nothing is touched.
    """

    def __init__(
        self,
        held: Iterable[nn.Parameter],
        *,
        groups: Sequence[dist.ProcessGroup],
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._groups, self._dtype = tuple(groups), dtype
        self._buckets: list[Bucket] = []
        self._armed, self._sent, self._fresh = False, 0, True
        if not self._groups:
            return
        parameters = [parameter for parameter in held if parameter.requires_grad]
        for chosen in _runs(list(reversed(parameters)), bucket_bytes):
            bucket = _bucket(chosen)
            self._buckets.append(bucket)
            for parameter in chosen:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._ready(bucket))

    def before_backward(self, *, last: bool) -> None:
        """Gradients are views of their buckets, zero before the step's first backward."""
        if self._fresh:
            self._fresh = False
            for bucket in self._buckets:
                bucket.flat.zero_()
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view
        if last:
            self._armed, self._sent = True, 0
            for bucket in self._buckets:
                bucket.waiting = len(bucket.parameters)

    def after_backward(self) -> None:
        """Every gradient is the sum over the ranks."""
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            self._receive(bucket)
        self._armed, self._fresh = False, True

    def after_evaluation(self) -> None:
        """Nothing: parameters are whole always."""

    def _ready(self, bucket: Bucket) -> None:
        if not self._armed:
            return
        bucket.waiting -= 1
        while self._sent < len(self._buckets) and self._buckets[self._sent].waiting == 0:
            self._send(self._buckets[self._sent])
            self._sent += 1

    def _send(self, bucket: Bucket) -> None:
        bucket.wire = bucket.flat if self._dtype is None else bucket.flat.to(self._dtype)
        work = dist.all_reduce(bucket.wire, group=self._groups[0], async_op=True)
        assert work is not None
        bucket.work.append(work)

    def _receive(self, bucket: Bucket) -> None:
        assert bucket.wire is not None
        for work in bucket.work:
            work.wait()
        for group in self._groups[1:]:
            dist.all_reduce(bucket.wire, group=group)
        if bucket.wire is not bucket.flat:
            bucket.flat.copy_(bucket.wire)
        bucket.wire = None
        bucket.work.clear()


def _runs(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Runs of one dtype of at most `most` bytes, but for a parameter that is larger alone."""
    runs: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        local = _local(parameter)
        if not runs or size + local.nbytes > most or runs[-1][0].dtype is not parameter.dtype:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += local.nbytes
    return runs


def _bucket(parameters: list[nn.Parameter]) -> Bucket:
    sizes = [_local(parameter).numel() for parameter in parameters]
    first = _local(parameters[0])
    flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    pieces = flat.split(sizes)
    views = [_like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)]
    return Bucket(flat=flat, parameters=parameters, views=views)


def _like(parameter: Tensor, piece: Tensor) -> Tensor:
    """`piece` in the shape and layout of `parameter`."""
    if not isinstance(parameter, DTensor):
        return piece.view_as(parameter)
    local = piece.view_as(parameter.to_local())
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
