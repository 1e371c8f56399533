"""Hybrid sharding over a slow network: what the shard axis has summed meets rounded or compressed among replicas."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.cost.states import BUCKET_BYTES
from meshwright.parallel.buckets import Bucket, BucketedGradients
from meshwright.parallel.clip import local_part
from meshwright.parallel.reduction import Travel
from meshwright.parallel.torch_compat import with_local


class ShardBuckets(BucketedGradients):
    """Gradients of the shards that this rank owns, which FSDP2 sums over the shard axis, are summed over the replicas,
    ranks that own the same shards.

    FSDP2 makes a shard's gradient and adds it up over microbatches; in the step's last backward it says when it is
    whole, as autograd does of a parameter's. A bucket takes its gradients when all are there, so that ZeRO-1 does not
    hold them beside the whole ones that it has until then.
    """

    def __init__(
        self,
        held: Iterable[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        travel: Travel,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        own = [parameter for parameter in held if local_part(parameter.detach()).numel()]
        super().__init__(own, groups=[group], travel=travel, bucket_bytes=bucket_bytes)
        self._release()

    def begin(self, *, step: int) -> None:
        super().begin(step=step)
        self._release()

    def _begin(self) -> None:
        """Nothing: FSDP2 makes gradients."""

    def _send(self, bucket: Bucket) -> None:
        gradients = [_gradient(parameter) for parameter in bucket.parameters]
        bucket.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pieces = bucket.flat.split([gradient.numel() for gradient in gradients])
        for parameter, gradient, piece in zip(bucket.parameters, gradients, pieces, strict=True):
            parameter.grad = with_local(parameter.detach(), piece.view_as(gradient))
        super()._send(bucket)

    def _release(self) -> None:
        """Between steps only what is left lasts."""
        for bucket in self._buckets:
            bucket.flat, bucket.views = bucket.flat.new_empty(0), []


def _gradient(parameter: nn.Parameter) -> Tensor:
    """What this rank has of it; zero where backward did not come."""
    return torch.zeros_like(local_part(parameter.detach())) if parameter.grad is None else local_part(parameter.grad)
