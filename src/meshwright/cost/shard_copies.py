"""What sharded parameters and gradients are copied on their own device, beside the collectives that carry them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind, DeviceSpec


class ShardCopies(StrEnum):
    """How a stack brings parameters into the buffers of its collectives and out of them.

    `NONE`: parameters and gradients lie in those buffers (Megatron's, XLA's).
    `UNITS`: what is gathered is split into parameters, and gradients are cast into one buffer, both on the stream that
    computes (split_with_sizes_copy and chunk_cat in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    `FLAT`: parameters are views of what is gathered, so that backward joins their gradients (torch.split's backward);
    those are then cast to what they travel in and divided before they are summed (_reduce_grad in
    torch/distributed/fsdp/_runtime_utils.py). That is done on a stream of its own, whose kernels hold the units alike.
    """

    NONE = "none"
    UNITS = "units"
    FLAT = "flat"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySeconds:
    """Seconds a parameter to copy what was gathered, and what is scattered; shape (rows,)."""

    gathered: FloatArray
    scattered: FloatArray


def copy_seconds(how: ShardCopies, *, compute: FloatArray, reduced: FloatArray, device: DeviceSpec) -> CopySeconds:
    """Of parameters of `compute` bytes whose gradients travel in `reduced` bytes, (rows,), on one accelerator.

    On processors none is told apart: what layers that are sharded cost there is measured whole (`shard_layer_seconds`).
    """
    nothing = np.zeros_like(compute)
    if device.kind is DeviceKind.CPU or how is ShardCopies.NONE:
        return CopySeconds(gathered=nothing, scattered=nothing)
    bandwidth = device.memory_bandwidth * device.memory_fraction
    if how is ShardCopies.UNITS:
        read, written = 2.0 * compute, compute + reduced
        return CopySeconds(gathered=read / bandwidth, scattered=written / bandwidth)
    cast = np.where(compute == reduced, 0.0, compute + reduced)
    return CopySeconds(gathered=nothing, scattered=(2.0 * compute + cast + 2.0 * reduced) / bandwidth)
