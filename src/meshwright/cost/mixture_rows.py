"""Element-wise work of a mixture on each row that an expert multiplies: bytes read and written in either pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.met import Routed, met
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Activation, Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """Bytes of one row, forward and backward."""

    forward: FloatArray
    backward: FloatArray


def row_bytes(part: Mixture, sizes: Sizes, *, hidden: FloatArray, holders: FloatArray) -> RowBytes:
    """Of a row that is laid out, padded, activated and given a bias on one of `holders` ranks of different experts,
    with `hidden` features there."""
    e, width = sizes.itemsize, float(part.width)
    laid_out = _mask_elements(width, sizes) if has_masks(part, sizes) else _laid_out_rows(part, holders, sizes)
    activated, back = _activated_elements(part, sizes)
    clamped, unclamped = _clamp_elements(part, sizes)
    added, summed = _bias_bytes(part, sizes)
    padded = _padding_bytes(sizes)
    return RowBytes(
        forward=e * (laid_out * width + (activated + clamped) * hidden) + width * (added + padded),
        backward=e * (2.0 * laid_out * width + (back + unclamped) * hidden) + width * (summed + padded),
    )


def has_masks(part: Mixture, sizes: Sizes) -> bool:
    """Whether tokens reach their experts by products with masks."""
    return sizes.experts.masks and part.routing.capacity is not None


def has_biases_apart(part: Mixture, sizes: Sizes) -> bool:
    """Whether the bias of what an expert gives is added expert by expert."""
    return sizes.experts.biases_apart and part.expert_bias


def _laid_out_rows(part: Mixture, holders: FloatArray, sizes: Sizes) -> FloatArray:
    """Rows read and written to lie by expert and back as they came, for each row that an expert multiplies.

    Sorted before they are sent and after they came, and back the same ways, are 8. A token that crosses once lies
    where it arrived and is copied to every expert of that rank, and their results are added up there.
    """
    once = met(holders, Routed(part.top_k, part.routing.groups, part.routing.chosen_groups))
    return 2.0 + 2.0 * once if sizes.experts.dispatches_once else 8.0 + 0.0 * once


def _mask_elements(width: float, sizes: Sizes) -> FloatArray:
    """Elements of both masks that are written, for each feature of a place at an expert."""
    return 2.0 * (sizes.zeros + sizes.sequence / sizes.context) / width


def _padding_bytes(sizes: Sizes) -> FloatArray:
    """Bytes an element of what experts read and give, each read and written once more in a pass."""
    quantized = sizes.kept_itemsize < sizes.itemsize
    return np.where(sizes.experts.copies_to_pad & quantized, 4.0 * sizes.itemsize, 0.0)


def _activated_elements(part: Mixture, sizes: Sizes) -> tuple[float, float]:
    """Elements moved a hidden feature, forward and backward, to activate.

    Kernels that activate what they multiply read nothing more forward, and backward what was activated.
    """
    if sizes.experts.fused:
        return 0.0, 2.0 if part.gated else 1.0
    return (5.0, 10.0) if part.gated else (2.0, 4.0)


def _clamp_elements(part: Mixture, sizes: Sizes) -> tuple[float, float]:
    """Elements moved a hidden feature, forward and backward, where clamps are kernels of their own.

    Forward either half is read, clamped and written, and both are joined to one. Backward each clamp reads its input
    beside the gradient, and the gradients of both halves are joined.
    """
    if not (sizes.experts.clamps_apart and part.activation is Activation.CLAMPED_SWIGLU):
        return 0.0, 0.0
    return 2.0 * 2.0 + 4.0, 2.0 * 3.0 + 4.0


def _bias_bytes(part: Mixture, sizes: Sizes) -> tuple[FloatArray | float, FloatArray | float]:
    """Bytes an element of what an expert gives, where its bias is scaled by the router and added expert by expert in
    fp32, and all are joined and narrowed (TEGroupedMLP._apply_bias of Megatron-Core); forward and backward.

    Backward widens, multiplies with the bias and with the router's weights, and sums either product.
    """
    if not has_biases_apart(part, sizes):
        return 0.0, 0.0
    e, wide = sizes.itemsize, sizes.wide
    return wide + (e + 2.0 * wide) + 2.0 * wide + sizes.casts, 2.0 * sizes.casts + 6.0 * wide
