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
    forward, backward = (np.minimum(reach * vector_peak, most) for reach, most in zip(scan.reach, fused, strict=True))
    return (
        _seconds(scan.forward, flops=forward, bandwidth=bandwidth),
        _seconds(scan.backward, flops=backward, bandwidth=bandwidth),
    )


def _seconds(kernels: tuple[Kernel, ...], *, flops: FloatArray, bandwidth: float) -> FloatArray:
    """At so many `flops` and bytes a second."""
    each = (np.maximum(kernel.flops / flops, kernel.bytes / bandwidth) for kernel in kernels)
    least = (kernel.least for kernel in kernels)
    return np.asarray(sum(np.maximum(*pair) for pair in zip(each, least, strict=True)), dtype=np.float64)
