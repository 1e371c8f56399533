"""From work to seconds on one device: curves of matrix products, attention, memory traffic and host time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost.operators import HEAD
from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS, IntArray
from meshwright.cost.work import FloatArray, PartWork, Product
from meshwright.spec.cluster import AttentionRate, AttentionShare, DeviceKind, DeviceSpec, MatrixCurve, Precision
from meshwright.spec.errors import ConfigError, Problem

# Of an element: written in fp8 as it lies and transposed, by the kernel that makes it; a gradient is read first.
_QUANTIZE_BYTES, _QUANTIZE_GRADIENT_BYTES = 2.0, 4.0
_ALIGNED_FEATURES = 8  # heads whose rows are not whole 16 bytes are multiplied on the vector units
_SCORE_TRAFFIC_BYTES = 13.0  # an unfused score: written, scaled, masked, softmaxed and dropped out in two bytes each
_BACKWARD_PRODUCTS = 2.5  # a fused backward computes the scores again: five products for two


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A device's figures for the precision of every row; arrays of shape (rows,).

    `head_peak` is that of the head's products, `vector_peak` that of fp32 without matrix units; `quantized` is 1
    where operands are quantised before a product.
    """

    peak: FloatArray
    head_peak: FloatArray
    vector_peak: FloatArray
    quantized: FloatArray
    fraction: FloatArray
    half_m: FloatArray
    half_n: FloatArray
    half_k: FloatArray
    attention: Attention
    bandwidth: float
    itemsize: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """FLOP/s of the scores' part forward and backward by wide heads, and the head width that reaches half of them."""

    forward: FloatArray
    backward: FloatArray
    half_dim: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of one part on its device, by pass, before any other rank contends; `core` and `core_backward` of the
    scores.

    `host_forward` and `host_backward` are what the host needs to start the work.
    """

    forward: FloatArray
    backward: FloatArray
    core: FloatArray
    core_backward: FloatArray
    host_forward: FloatArray
    host_backward: FloatArray


def rates(device: DeviceSpec, *, precision: IntArray, length: int, software: Software) -> Rates:
    """The figures of `device` row by row for sequences of `length`.

    Raises ConfigError when it has no peak for a precision in use.
    """
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
    curves = [_curve(device, entry) if entry in used else _FLAT for entry in PRECISIONS]
    attention = [_attention(device, entry, length=length, software=software) for entry in PRECISIONS]

    def pick(values: list[float]) -> FloatArray:
        return np.asarray(values, dtype=np.float64)[precision]

    return Rates(
        peak=pick([_peak(device, entry) for entry in PRECISIONS]),
        head_peak=pick([_peak(device, _unquantized(entry)) for entry in PRECISIONS]),
        vector_peak=pick([_vector_peak(device, entry) for entry in PRECISIONS]),
        quantized=pick([float(entry.quantized) for entry in PRECISIONS]),
        fraction=pick([curve.fraction for curve in curves]),
        half_m=pick([curve.half_m for curve in curves]),
        half_n=pick([curve.half_n for curve in curves]),
        half_k=pick([curve.half_k for curve in curves]),
        attention=Attention(
            forward=pick([entry.forward_flops for entry in attention]),
            backward=pick([entry.backward_flops for entry in attention]),
            half_dim=pick([entry.half_dim for entry in attention]),
        ),
        bandwidth=device.memory_bandwidth * device.memory_fraction,
        itemsize=activation_bytes(precision),
    )


def activation_bytes(precision: IntArray) -> FloatArray:
    """Bytes of an activation: those of the precision, but two under fp8, whose activations stay in bf16."""
    sizes = [2.0 if entry.quantized else float(entry.bytes) for entry in PRECISIONS]
    return np.asarray(sizes, dtype=np.float64)[precision]


def part_seconds(part: PartWork, *, device: DeviceSpec, rates: Rates, software: Software) -> PassSeconds:
    """Seconds of `part` forward and backward on one idle device of which one core (or all of it) works.

    Under fp8 what enters a product and the gradient of what leaves it are quantised each time, weights once a step,
    and the head stays in bf16, as in the recipes of Transformer Engine.
    """
    zeros = np.zeros_like(rates.peak)
    forward, backward = zeros, zeros
    if part.name == HEAD:
        rates = replace(rates, peak=rates.head_peak, quantized=zeros)
    for product in part.products:
        cast = rates.quantized * product.count * product.m / rates.bandwidth
        forward = forward + cast * product.k * _QUANTIZE_BYTES
        backward = backward + cast * product.n * _QUANTIZE_GRADIENT_BYTES
        forward = forward + _product_seconds(product.m, product.n, product.k, product, rates)
        backward = backward + _product_seconds(product.m, product.k, product.n, product, rates)
        backward = backward + _product_seconds(product.k, product.n, product.m, product, rates)
    core, core_backward = _score_seconds(part, rates=rates, software=software)
    forward = forward + core + part.traffic / rates.bandwidth
    backward = backward + core_backward + part.backward_traffic / rates.bandwidth
    launch = part.kernels * device.launch_seconds
    return PassSeconds(
        forward=forward,
        backward=backward,
        core=core,
        core_backward=core_backward,
        host_forward=zeros + launch,
        host_backward=zeros + 2.0 * launch,
    )


def with_host(gpu: FloatArray, host: FloatArray, *, device: DeviceSpec) -> FloatArray:
    """Seconds of a pass whose device work is `gpu` and whose host work is `host`.

    An accelerator runs behind its host, so the longer of the two counts; a processor does both itself.
    """
    return gpu + host if device.kind is DeviceKind.CPU else np.maximum(gpu, host)


def optimizer_seconds(parameters: FloatArray, *, device: DeviceSpec, clipped: bool) -> FloatArray:
    """Seconds of AdamW over `parameters` held in fp32: 28 bytes each, 4 to zero the gradient, 12 more to clip it."""
    bandwidth = device.memory_bandwidth * device.memory_fraction
    step = 28.0 * parameters / (device.optimizer_bandwidth or bandwidth)
    return step + (16.0 if clipped else 4.0) * parameters / bandwidth


def _product_seconds(
    m: FloatArray, n: FloatArray, k: FloatArray, product: Product, rates: Rates
) -> npt.NDArray[np.float64]:
    achieved = rates.peak * rates.fraction
    achieved = achieved * (m / (m + rates.half_m)) * (n / (n + rates.half_n)) * (k / (k + rates.half_k))
    moved = rates.itemsize * (m * k + k * n + m * n)
    return product.count * np.maximum(2.0 * m * n * k / achieved, moved / rates.bandwidth)


def _score_seconds(part: PartWork, *, rates: Rates, software: Software) -> tuple[FloatArray, FloatArray]:
    """Seconds of the scores' part forward and backward: fused kernels, or batched products with scores in memory."""
    flops = part.score_flops + np.zeros_like(rates.peak)
    if part.score_dim:
        flops = flops * (1.0 + rates.attention.half_dim / part.score_dim)
    backward = _BACKWARD_PRODUCTS * flops / rates.attention.backward
    fused = flops / rates.attention.forward
    if software.fused_attention:
        return fused, backward
    traffic = part.scores * _SCORE_TRAFFIC_BYTES / rates.bandwidth
    if part.score_dim % _ALIGNED_FEATURES:
        fused = np.maximum(fused, flops / rates.vector_peak)
    return 2.0 * fused + traffic, 4.0 * fused + 2.0 * traffic


def _attention(device: DeviceSpec, precision: Precision, *, length: int, software: Software) -> AttentionRate:
    """What the device does at this length: measured lengths interpolated, else its fractions of the peak."""
    precision = _unquantized(precision)
    if software.widens(device.kind, length=length) and precision in (Precision.BF16, Precision.FP16):
        precision = Precision.FP32
    known = sorted((rate for rate in device.attention_rates if rate.precision is precision), key=_length)
    if not known:
        peak = _peak(device, precision)
        share = _attention_share(device, software)
        forward, backward = share.forward * peak, share.backward * peak
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
