"""A device's figures for the precision of every row: rates of products and attention, bytes that quantising moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.products import ProductRates
from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS, IntArray
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import AttentionKernel, AttentionRate, AttentionShare, DeviceSpec, MatrixCurve, Precision
from meshwright.spec.errors import ConfigError, Problem


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

    def slowed(self, share: FloatArray) -> Rates:
        """The same where products and attention go at `share` of their rates; shape (rows,)."""
        return replace(
            self,
            products=replace(self.products, achieved=self.products.achieved * share),
            head=replace(self.head, achieved=self.head.achieved * share),
            attention=replace(
                self.attention, forward=self.attention.forward * share, backward=self.attention.backward * share
            ),
        )


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
    known = device.attention_kernels if software.fused_attention else {}
    asked = AttentionKernel.TRITON if software.torch_attention and AttentionKernel.TRITON in known else None
    return known.get(asked or software.attention_kernel, own)


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
