"""From work to seconds on one device: curves of matrix products, attention, memory traffic and host time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.cost.operators import HEAD
from meshwright.cost.products import product_seconds
from meshwright.cost.rates import Attention, Rates
from meshwright.cost.scan_seconds import scan_seconds
from meshwright.cost.software import Software
from meshwright.cost.work import FloatArray, PartWork
from meshwright.spec.cluster import DeviceSpec

ADAMW_BYTES = 28.0  # a parameter: torch's fused kernel reads it, its gradient and two moments, and writes all but that
_ACCUMULATED_BYTES = 8.0  # an element of a gradient that a product adds to: read and written in fp32
_ALIGNED_FEATURES = 8  # heads whose rows are not whole 16 bytes are multiplied on the vector units
_DROPPED = 2.0  # passes over scores that drop some out: read and written, beside a mask of one byte
_PLAIN_SOFTMAX = (6.0, 5.0)  # elements of scores moved forward and backward by three passes in half precision
_WIDE_SOFTMAX = (18.0, 20.0)  # by five passes in fp32, counted in elements of half precision
_NARROW = 0.45  # of the keys: a causal mask shows half of them, so less is a window
_WIDE_HEAD = 128.0  # features of the heads whose attention was measured
_BACKWARD_PRODUCTS = 2.5  # a fused backward computes the scores again: five products for two


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Seconds of a part's products before anything contends: those that read what enters a divided part, and the last,
    whose result leaves it; forward, of data gradients, and of the former's weight gradients.
    """

    entering: FloatArray
    leaving: FloatArray
    entering_data: FloatArray
    leaving_data: FloatArray
    entering_weight: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of one part on its device, by pass, before any other rank contends; `core` and `core_backward` of the
    scores, `weight` of the backward's products that give gradients of weights; `products` those that collectives may
    run beside.

    `host_forward` and `host_backward` are what the host needs to start the work, `host_core` of it what meets the keys
    of other context ranks forward.
    """

    forward: FloatArray
    backward: FloatArray
    core: FloatArray
    core_backward: FloatArray
    weight: FloatArray
    products: Beside
    host_forward: FloatArray
    host_backward: FloatArray
    host_core: FloatArray


def part_seconds(part: PartWork, *, device: DeviceSpec, rates: Rates, software: Software) -> PassSeconds:
    """Seconds of `part` forward and backward on one idle device of which one core (or all of it) works.

    Under fp8 what enters a product and the gradient of what leaves it are quantised each time, weights once a step,
    and the head stays in bf16, as in the recipes of Transformer Engine.
    """
    zeros = np.zeros_like(rates.bandwidth * rates.itemsize)
    forward, backward, weights = zeros, zeros, zeros
    head = part.name == HEAD
    products = rates.head if head else rates.products
    sums = replace(products, result=zeros + _ACCUMULATED_BYTES) if software.fused_accumulation else products
    each: list[tuple[FloatArray, FloatArray, FloatArray]] = []
    for product in part.products:
        m, n, k = product.m, product.n, product.k
        blocks = product.multiplied_rows(device.tiles.units if device.tiles else 1)
        if not head:
            inputs = product.inputs if software.quantizes_once else product.count
            forward = forward + rates.quantize * inputs * m * k / rates.bandwidth
            backward = backward + rates.quantize_gradient * product.count * m * n / rates.bandwidth
        least = np.where(np.asarray(product.together) > 1.0, software.expert_seconds, 0.0)
        once = partial(product_seconds, together=software.experts_together(product.together), least=least)
        result = product.count * once(blocks, n, k, products, rows=(k,))
        data = product.count * once(blocks, k, n, products, rows=(k, n))
        weight = zeros if product.given else product.count * once(k, n, blocks, sums, rows=(k, n))
        each.append((result, data, weight))
        forward, backward, weights = forward + result, backward + data, weights + weight
    if part.scan is None:
        scores = _score_seconds(part, rates=rates, software=software)
        core, core_backward = (seconds * part.heaviest for seconds in scores)
    else:
        core, core_backward = zeros, zeros
        fused = (rates.attention.forward, rates.attention.backward)
        scanned = scan_seconds(part.scan, vector_peak=rates.vector_peak, fused=fused, bandwidth=rates.bandwidth)
        forward, backward = forward + scanned[0], backward + scanned[1]
    forward = forward + core + part.traffic / rates.bandwidth
    backward = backward + weights + core_backward + part.backward_traffic / rates.bandwidth
    launch, met = part.kernels * device.launch_seconds, zeros + part.met * device.launch_seconds
    return PassSeconds(
        forward=forward,
        backward=backward,
        core=core,
        core_backward=core_backward,
        weight=weights,
        products=_beside(each, zeros),
        host_forward=launch + met,
        host_backward=zeros + 2.0 * launch + part.met_backward * device.launch_seconds,
        host_core=met,
    )


def _beside(each: Sequence[tuple[FloatArray, FloatArray, FloatArray]], zeros: FloatArray) -> Beside:
    """Of (result, data gradient, weight gradient) of every product of a part, the last of which leaves it."""
    first, last = each[:-1], each[-1:]
    return Beside(
        entering=sum((one[0] for one in first), zeros),
        leaving=sum((one[0] for one in last), zeros),
        entering_data=sum((one[1] for one in first), zeros),
        leaving_data=sum((one[1] for one in last), zeros),
        entering_weight=sum((one[2] for one in first), zeros),
    )


def with_host(gpu: FloatArray, host: FloatArray, *, in_turn: bool) -> FloatArray:
    """Seconds of a pass whose device work is `gpu` and whose host work is `host`.

    They are done `in_turn`, as by a processor, which is its own host, or an accelerator runs behind its host, so that
    the longer of the two counts.
    """
    return gpu + host if in_turn else np.maximum(gpu, host)


def optimizer_seconds(parameters: FloatArray, *, device: DeviceSpec, clipped: bool) -> FloatArray:
    """Seconds of AdamW over `parameters` held in fp32: 28 bytes each, 4 to zero the gradient, 12 more to clip it."""
    bandwidth = device.memory_bandwidth * device.memory_fraction
    step = ADAMW_BYTES * parameters / (device.optimizer_bandwidth or bandwidth)
    return step + (16.0 if clipped else 4.0) * parameters / bandwidth


def _score_seconds(part: PartWork, *, rates: Rates, software: Software) -> tuple[FloatArray, FloatArray]:
    """Seconds of the scores' part forward and backward: fused kernels, or batched products with scores in memory."""
    if part.score_dim and not software.fused_attention:
        return _unfused_seconds(part, rates, software=software)
    flops = part.score_flops + np.zeros_like(rates.itemsize)
    if part.score_dim:
        flops = flops * (1.0 + rates.attention.half_dim / part.score_dim)
        narrow = min(part.score_dim, _WIDE_HEAD)
        flops = flops * (1.0 + rates.attention.narrow / narrow) / (1.0 + rates.attention.narrow / _WIDE_HEAD)
    return _fused_seconds(part, flops, rates.attention)


def _unfused_seconds(part: PartWork, rates: Rates, *, software: Software) -> tuple[FloatArray, FloatArray]:
    """Two batched products forward and four backward, of every score, with softmax and dropout between them.

    Megatron's softmax scales and masks as well (1909.08053): it reads the scores that the mask shows and writes all;
    its backward reads those and their gradients. Plain, scores are copied, masked and softmaxed, each reading and
    writing all; backward is that of the last two. Megatron's kernel takes `softmax_heads` at a time; other numbers of
    heads are widened to fp32, scaled, masked, softmaxed and narrowed in a pass each (is_kernel_available in its
    fused_softmax.py). Heads whose rows are not whole 16 bytes leave the matrix units.
    """
    length, width = (np.full_like(rates.itemsize, size) for size in (rates.attention.length, part.score_dim))
    keys = length * part.keys
    count = part.scores / (length * keys)
    batched = partial(product_seconds, rates=rates.head, together=count)
    inner, outer = count * batched(length, keys, width), count * batched(length, width, keys)
    if part.score_dim % _ALIGNED_FEATURES:
        slow = 2.0 * part.scores * width / rates.vector_peak
        inner, outer = np.maximum(inner, slow), np.maximum(outer, slow)
    seen = part.score_flops / (4.0 * width * part.scores)
    softmax, gradient = _PLAIN_SOFTMAX if software.plain_softmax else (1.0 + seen, 1.0 + 2.0 * seen)
    if software.softmax_heads:
        odd = np.rint(count) % software.softmax_heads > 0
        softmax, gradient = (
            np.where(odd, wide, kernel) for wide, kernel in zip(_WIDE_SOFTMAX, (softmax, gradient), strict=True)
        )
    dropped = _DROPPED * rates.itemsize + 1.0 if software.dropout else 0.0
    once = part.scores / rates.bandwidth
    forward = inner + outer + once * (softmax * rates.itemsize + dropped)
    return forward, inner + 3.0 * outer + once * (gradient * rates.itemsize + dropped)


def _fused_seconds(part: PartWork, flops: FloatArray, rates: Attention) -> tuple[FloatArray, FloatArray]:
    """Blocks of queries and keys that a mask cuts are computed whole, and few blocks leave units idle.

    A row of blocks is cut once by the diagonal, half of it hidden, and once more where a window or a chunk ends.
    """
    backward = _BACKWARD_PRODUCTS * flops / rates.backward
    forward = flops / rates.forward
    if not (rates.block and part.score_dim):
        return forward, backward
    blocks = np.maximum(part.scores / (rates.length * rates.block), 1.0)
    seen = part.score_flops * rates.length / (4.0 * part.score_dim * part.scores)
    cuts = np.where(seen < _NARROW * rates.length, 2.0, np.where(seen < rates.length, 1.0, 0.0))
    whole = np.minimum(seen + 0.5 * cuts * rates.block, rates.length) / seen
    return (
        forward * whole * (1.0 + rates.forward_half / blocks),
        backward * whole * (1.0 + rates.backward_half / blocks),
    )
