"""From work to seconds on one device: curves of matrix products, attention, memory traffic and host time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.cost.operators import HEAD
from meshwright.cost.products import ProductRates, product_seconds
from meshwright.cost.scan_seconds import scan_seconds
from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS, IntArray
from meshwright.cost.work import FloatArray, PartWork
from meshwright.spec.cluster import AttentionRate, AttentionShare, DeviceSpec, MatrixCurve, Precision
from meshwright.spec.errors import ConfigError, Problem

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
class Rates:
    """A device's figures for the precision of every row; arrays of shape (rows,).

    `products` are those of blocks and `head` those of the head, which stays in bf16 where blocks are quantised;
    `vector_peak` is that of fp32 without matrix units; `quantize` bytes to quantise an element of an input and
    `quantize_gradient` of a gradient.
    """

    products: ProductRates
    head: ProductRates
    vector_peak: FloatArray
    quantize: FloatArray
    quantize_gradient: FloatArray
    attention: Attention
    bandwidth: float
    itemsize: FloatArray

    def times(self, tokens: float) -> Rates:
        """The same for a block that sees `tokens` times as many tokens of every sequence."""
        length = max(1, round(self.attention.length * tokens))
        return self if tokens == 1.0 else replace(self, attention=replace(self.attention, length=length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """FLOP/s of the scores' part forward and backward by wide heads, and the head width that reaches half of them.

    Kernels work on `block` rows of `length` at a time; `forward_half` and `backward_half` blocks reach half the rates.
    `narrow` is that head width where the rates are of heads of 128 features.
    """

    forward: FloatArray
    backward: FloatArray
    half_dim: FloatArray
    forward_half: float
    backward_half: float
    block: int
    length: int
    narrow: float = 0.0


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


def rates(device: DeviceSpec, *, precision: IntArray, length: int, software: Software) -> Rates:
    """The figures of `device` row by row for sequences of `length`.

    Raises ConfigError when it has no peak for a precision in use.
    """
    used = _used(device, precision)
    attention = [_attention(device, entry, length=length, software=software) for entry in PRECISIONS]

    def pick(values: list[float]) -> FloatArray:
        return np.asarray(values, dtype=np.float64)[precision]

    share = _attention_share(device, software)
    itemsize = activation_bytes(precision)
    bandwidth = device.memory_bandwidth * device.memory_fraction

    def products(entries: list[Precision]) -> ProductRates:
        """Of products in `entries`, one a precision of the layers."""
        whole = zip(PRECISIONS, entries, strict=True)
        curves = [_curve(device, entry) if layers in used else _FLAT for layers, entry in whole]
        return ProductRates(
            achieved=pick([_peak(device, entry) for entry in entries]) * pick([curve.fraction for curve in curves]),
            half_m=pick([curve.half_m for curve in curves]),
            half_n=pick([curve.half_n for curve in curves]),
            half_k=pick([curve.half_k for curve in curves]),
            bandwidth=bandwidth,
            operand=pick([entry.operand_bytes for entry in entries]),
            result=itemsize,
            tiles=device.tiles,
        )

    return Rates(
        products=products(list(PRECISIONS)),
        head=products([_unquantized(entry) for entry in PRECISIONS]),
        vector_peak=pick([_vector_peak(device, entry) for entry in PRECISIONS]),
        quantize=pick([quantize_bytes(entry)[0] for entry in PRECISIONS]),
        quantize_gradient=pick([quantize_bytes(entry)[1] for entry in PRECISIONS]),
        attention=Attention(
            forward=pick([entry.forward_flops for entry in attention]),
            backward=pick([entry.backward_flops for entry in attention]),
            half_dim=pick([entry.half_dim for entry in attention]),
            forward_half=share.forward_half,
            backward_half=share.backward_half,
            block=0 if device.attention_rates else share.block,
            narrow=0.0 if device.attention_rates else share.half_dim,
            length=length,
        ),
        bandwidth=bandwidth,
        itemsize=itemsize,
    )


def _used(device: DeviceSpec, precision: IntArray) -> set[Precision]:
    """The precisions of every row; raises ConfigError where the device has no peak for one."""
    used = {PRECISIONS[int(index)] for index in np.unique(precision)}
    missing = sorted(entry.value for entry in used if not device.peak_flops.get(entry))
    if missing:
        known = ", ".join(sorted(entry.value for entry in device.peak_flops)) or "none"
        raise ConfigError(
            Problem(
                what=f"device {device.name!r} has no peak for {', '.join(missing)}",
                where="cluster.groups.device.peak_flops",
                why=f"it has {known}",
                fix="choose one of those, or add the device's peak",
            )
        )
    return used


def quantize_bytes(precision: Precision) -> tuple[float, float]:
    """Bytes to quantise an element of a product's input and of its output's gradient, as Transformer Engine does it.

    One scale a tensor (delayed): the kernel that makes an input also writes it, as it lies and transposed; a gradient
    is read first. Scales for blocks: read, and written along both dims with one scale for 128 elements (fp8-block, 4
    bytes) or 32 (mxfp8, 1 byte). nvfp4 (2509.25149) reads a tensor for its largest magnitude, again as it lies, and
    again for the transposed copy that a Hadamard transform turns, and writes half a byte and a scale for 16 each.
    Scales for rows (fp8-row): a row is read once and written, and columns are read for their largest magnitudes first.
    """
    if precision in (Precision.FP8_ROW, Precision.FP8_BLOCK, Precision.MXFP8, Precision.NVFP4):
        reads = 6.0 if precision in (Precision.FP8_ROW, Precision.NVFP4) else 2.0
        both = reads + 2.0 * precision.stored_bytes
        return both, both
    return (2.0, 4.0) if precision.quantized else (0.0, 0.0)


def activation_bytes(precision: IntArray) -> FloatArray:
    """Bytes of an activation: those of the precision, but two under fp8, whose activations stay in bf16."""
    sizes = [2.0 if entry.quantized else float(entry.bytes) for entry in PRECISIONS]
    return np.asarray(sizes, dtype=np.float64)[precision]


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


def _attention(device: DeviceSpec, precision: Precision, *, length: int, software: Software) -> AttentionRate:
    """What the device does at this length: measured, or its fractions of the peak, in fp32 none above products'."""
    precision = _unquantized(precision)
    if software.widens(device.kind, length=length) and precision in (Precision.BF16, Precision.FP16):
        precision = Precision.FP32
    known = sorted((rate for rate in device.attention_rates if rate.precision is precision), key=_length)
    if not known:
        peak = _peak(device, precision)
        share = _attention_share(device, software)
        most = _curve(device, precision).fraction if precision is Precision.FP32 else 1.0
        forward, backward = min(share.forward, most) * peak, min(share.backward, most) * peak
        return AttentionRate(precision=precision, length=length, forward_flops=forward, backward_flops=backward)
    lengths = np.log([rate.length for rate in known])

    def at(values: list[float]) -> float:
        return float(np.interp(np.log(length), lengths, values))

    return AttentionRate(
        precision=precision,
        length=length,
        forward_flops=at([rate.forward_flops for rate in known]),
        backward_flops=at([rate.backward_flops for rate in known]),
        half_dim=at([rate.half_dim for rate in known]),
    )


def _attention_share(device: DeviceSpec, software: Software) -> AttentionShare:
    """Of fused attention by its kernel where that is known; else the device's own."""
    own = AttentionShare(forward=device.attention_fraction, backward=device.attention_backward_fraction)
    return device.attention_kernels.get(software.attention_kernel, own) if software.fused_attention else own


def _peak(device: DeviceSpec, precision: Precision) -> float:
    return device.peak_flops.get(precision) or np.nan


def _vector_peak(device: DeviceSpec, precision: Precision) -> float:
    return device.peak_flops.get(Precision.FP32) or _peak(device, precision)


def _unquantized(precision: Precision) -> Precision:
    """What is computed in where nothing is quantised."""
    return Precision.BF16 if precision.quantized else precision


def _length(rate: AttentionRate) -> int:
    return rate.length


_FLAT = MatrixCurve(fraction=1.0, half_m=0.0, half_n=0.0, half_k=0.0)


def _curve(device: DeviceSpec, precision: Precision) -> MatrixCurve:
    """The curve of `precision`, or of the nearest precision that has one; raises ConfigError when none has."""
    order = (precision, Precision.BF16, Precision.FP16, Precision.TF32, Precision.FP32, Precision.FP64, Precision.FP8)
    found = next((device.matrix[entry] for entry in order if entry in device.matrix), None)
    if found is None:
        raise ConfigError(
            Problem(
                what=f"device {device.name!r} has no matrix curve",
                where="cluster.groups.device.matrix",
                fix="give at least one, or measure the machine",
            )
        )
    return found
