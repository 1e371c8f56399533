"""Plain data parallel: gradients live in buckets that are summed over the ranks while backward goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.cost.states import BUCKET_BYTES
from meshwright.parallel.reduction import Reduction, Travel
from meshwright.parallel.shards import as_part


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Gradients of `parameters` as views of one flat tensor; `waiting` of them are not ready in the last backward."""

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    reduction: Reduction
    waiting: int = 0


class BucketedGradients:
    """Gradients of parameters that every rank of `groups` holds alike: summed once a step (PyTorch Distributed,
    2006.15704).

    Gradients add up in place over microbatches. In the last backward a bucket is sent as soon as all before it are
    sent and all its gradients are ready, so that every rank sends in one order. Distributed tensors are summed by
    their local parts. `travel` says how: whole, in less precision or compressed. No group means that there is no other
    rank, and then nothing is touched.
    """

    def __init__(
        self,
        held: Iterable[nn.Parameter],
        *,
        groups: Sequence[dist.ProcessGroup],
        travel: Travel | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._buckets: list[Bucket] = []
        self._step = 0
        self._armed, self._sent, self._fresh = False, 0, True
        self._early: set[nn.Parameter] = set()
        self._is_input = False
        if not groups:
            return
        parameters = [parameter for parameter in held if parameter.requires_grad]
        for chosen in _runs(list(reversed(parameters)), bucket_bytes):
            bucket = _bucket(chosen, travel=travel or Travel(), groups=groups)
            self._buckets.append(bucket)
            for parameter in chosen:
                parameter.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._ready(p, bucket))

    def begin(self, *, step: int) -> None:
        """Compression goes by the number of the step."""
        self._step = step

    def after_forward(self, *, last: bool) -> None:
        """Nothing: parameters are whole always."""

    def before_backward(self, *, last: bool) -> None:
        """Gradients are views of their buckets, zero before the step's first backward."""
        self._begin()
        if last:
            self._arm(frozenset())

    def before_input(self) -> None:
        """As before any backward that is not the last; which gradients come with the input's is noted."""
        self._begin()
        self._is_input = True

    def before_weights(self, *, last: bool) -> None:
        """The gradients that came with the inputs' are ready before the step's last matrices' are formed."""
        self._is_input = False
        if last:
            self._arm(frozenset(self._early))

    def unit_done(self, unit: nn.Module) -> None:
        """Nothing: a bucket goes when its gradients are ready."""

    def after_weights(self) -> None:
        """Nothing, for the same reason."""

    def _begin(self) -> None:
        self._is_input = False
        if self._fresh:
            self._fresh = False
            for bucket in self._buckets:
                bucket.flat.zero_()
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view

    def _arm(self, ready: frozenset[nn.Parameter]) -> None:
        self._armed, self._sent = True, 0
        for bucket in self._buckets:
            bucket.waiting = sum(parameter not in ready for parameter in bucket.parameters)
        self._send_ready()

    def after_backward(self) -> None:
        """Every gradient is the sum over the ranks."""
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            bucket.reduction.turn()
        for bucket in self._buckets:
            bucket.reduction.finish(bucket.flat)
        self._armed, self._fresh = False, True

    def after_evaluation(self) -> None:
        """Nothing: parameters are whole always."""

    def _ready(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        if self._is_input:
            self._early.add(parameter)
        if not self._armed:
            return
        bucket.waiting -= 1
        self._send_ready()

    def _send_ready(self) -> None:
        while self._sent < len(self._buckets) and self._buckets[self._sent].waiting == 0:
            self._send(self._buckets[self._sent])
            self._sent += 1

    def residuals(self) -> list[Tensor]:
        """What is kept from step to step: gradients that were left out, to be sent with the next ones, and factors."""
        return [x for bucket in self._buckets for x in bucket.reduction.state]

    def _send(self, bucket: Bucket) -> None:
        bucket.reduction.start(bucket.flat, step=self._step)


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


def _bucket(parameters: list[nn.Parameter], *, travel: Travel, groups: Sequence[dist.ProcessGroup]) -> Bucket:
    shapes = [_local(parameter).shape for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    first = _local(parameters[0])
    flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    pieces = flat.split(sizes)
    views = [_like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)]
    return Bucket(flat=flat, parameters=parameters, views=views, reduction=travel.reduction(flat, shapes, groups))


def _like(parameter: Tensor, piece: Tensor) -> Tensor:
    """`piece` in the shape and layout of `parameter`."""
    if not isinstance(parameter, DTensor):
        return piece.view_as(parameter)
    local = piece.view_as(parameter.to_local())
    return as_part(local, parameter.device_mesh, parameter.placements, of=parameter)


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
