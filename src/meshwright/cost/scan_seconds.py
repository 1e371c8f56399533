"""Seconds of a recurrence's kernels: each is bound by the memory, by the vector units or by what waits for the rest."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray, Kernel, Scan


def scan_seconds(
    scan: Scan, *, vector_peak: FloatArray, fused: tuple[FloatArray, FloatArray], bandwidth: float
) -> tuple[FloatArray, FloatArray]:
    """Of all kernels of `scan` forward and backward, which fetch the next tiles while they multiply.

    None multiplies faster than `fused` attention does in its pass.
    """

    def seconds(kernel: Kernel, most: FloatArray) -> FloatArray:
        flops = np.minimum(kernel.reach * vector_peak, most)
        bound = np.maximum(kernel.flops / flops, kernel.bytes / bandwidth)
        return np.asarray(np.maximum(bound, kernel.least), dtype=np.float64)

    none = np.zeros_like(vector_peak)
    return (
        sum((seconds(kernel, fused[0]) for kernel in scan.forward), none),
        sum((seconds(kernel, fused[1]) for kernel in scan.backward), none),
    )
