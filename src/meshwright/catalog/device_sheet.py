"""A data sheet, and the device it describes with what its generation shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.catalog.device_curves import AMPERE, BLACKWELL, BLACKWELL_ULTRA, Generation
from meshwright.spec.cluster import (
    AttentionKernel,
    AttentionShare,
    DeviceKind,
    DeviceSpec,
    MatrixCurve,
    MatrixTiles,
    Precision,
)

GIB = 2.0**30
_VECTOR = (Precision.FP32, Precision.FP64)

_MEMORY = "total memory as PyTorch reports it, rounded"
_RESERVED = "a CUDA context of about 0.5 GiB and one set of NCCL buffers of 0.34 to 0.39 GiB"
_ELEMENTWISE = "0.7 of the data sheet's bandwidth reproduces the step times of 2104.04473, table 1, within 9 %"
_ATTENTION = "fused attention at half of peak forward, 0.4 backward: the same fit; not measured by itself"
_USABLE = "memory in use over memory reserved as SimuMax measures it on B200"
# Eight percent between the whiskers of a box, 5.4 standard deviations apart where rates are normal.
_SPREAD = 0.08 / 5.4
_SPREAD_SOURCE = (
    "products of equal V100, MI60 and RTX 5000 in five clusters vary by 8 % apart from outliers, what memory bounds by "
    "1 % (2208.11035), taken to be what lies between the whiskers of a box plot, 5.4 standard deviations"
)
_COMPILED = "a compiled program has a place for every buffer: nothing is lost between them"
_RUNTIME = "about 15.75 of 16 GiB of a TPU v5e are a program's, as XLA tells when it runs out; typical, not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One data sheet: memory in GiB, bandwidth in GB/s, dense peaks in TFLOP/s (None where the device has none).

    `units` multiprocessors where they are not those of the generation's measured device.
    """

    name: str
    generation: Generation
    title: str
    memory_gib: float
    bandwidth_gb: float
    watts: float | None = None
    fp16: float | None = None
    fp32: float | None = None
    bf16: float | None = None
    tf32: float | None = None
    fp8: float | None = None
    mxfp8: float | None = None
    nvfp4: float | None = None
    fp64: float | None = None
    aliases: tuple[str, ...] = ()
    kind: DeviceKind = DeviceKind.CUDA
    units: int | None = None

    def variant(self, *, name: str, title: str, aliases: tuple[str, ...] = (), **differs: Any) -> Sheet:
        """The sheet of a device that is as this one but for what is named; `differs` are fields of the sheet."""
        return replace(self, name=name, title=title, aliases=aliases, **differs)

    @property
    def peaks(self) -> dict[Precision, float]:
        """By precision; scales for rows and blocks of elements take nothing from the peak of eight bits."""
        scaled = self.fp8 if self.generation in (BLACKWELL, BLACKWELL_ULTRA) else None
        own = {precision: getattr(self, precision.value, None) for precision in Precision}
        peaks = own | {
            Precision.FP8_ROW: self.fp8,
            Precision.FP8_BLOCK: self.fp8,
            Precision.MXFP8: self.mxfp8 or scaled,
        }
        return {precision: peak * 1e12 for precision, peak in peaks.items() if peak}

    def _sustained(self, peak: float, each: float | None) -> float:
        """The share of `peak` FLOP/s that the board's watts sustain at `each` a watt; 1 where that is not known."""
        return min(1.0, each * self.watts / peak) if each and self.watts else 1.0

    def _products(self) -> float:
        """The share of the peak in half precision that products reach."""
        half = self.fp16 or self.bf16
        fraction = self.generation.curve.fraction
        return min(fraction, self._sustained(half * 1e12, self.generation.flops_per_watt)) if half else fraction

    def _curve(self, precision: Precision) -> MatrixCurve:
        shared, peak = self.generation, self.peaks[precision]
        if precision in _VECTOR:
            fraction = shared.vector_fraction or shared.curve.fraction
            power = shared.vector_flops_per_watt if precision is Precision.FP32 else None
            return replace(shared.curve, fraction=min(fraction, self._sustained(peak, power)))
        gain = shared.narrow.get(precision)
        share = shared.eight_bit if precision.quantized else 1.0
        if gain is None:
            return replace(shared.curve, fraction=share * self._products())
        sustained = self._sustained(peak, gain * (shared.flops_per_watt or 0.0))
        return replace(shared.curve, fraction=min(share * shared.curve.fraction, sustained))

    def _attention(self) -> dict[AttentionKernel, AttentionShare]:
        """The generation's shares, less what the power limit takes of products; blocks as the board has units."""
        shared = self.generation
        power = min(1.0, self._products() / shared.attention_products) if shared.attention_products else 1.0
        units = self.units / shared.tiles.units if self.units and shared.tiles else 1.0
        return {
            kernel: replace(
                share,
                forward=share.forward * power,
                backward=share.backward * power,
                forward_half=share.forward_half * units,
                backward_half=share.backward_half * units,
            )
            for kernel, share in shared.attention.items()
        }

    def _tiles(self) -> MatrixTiles | None:
        tiles = self.generation.tiles
        return replace(tiles, units=self.units or tiles.units) if tiles else None

    def device(self) -> DeviceSpec:
        """The device, each of its numbers with a source."""
        shared, compiled = self.generation, self.kind is DeviceKind.TPU
        analogy = "" if self.name == shared.measured or not shared.measured else f"by analogy with {shared.measured}: "
        sources = {
            "peak_flops": f"{self.title}, dense",
            "memory_bandwidth": self.title,
            "memory_bytes": _MEMORY,
            "watts": self.title if self.watts else "not published",
            "matrix": ("" if self.name in shared.beside else analogy) + shared.curve_source,
            "launch_seconds": ("" if shared.launch_source.startswith("by analogy") else analogy) + shared.launch_source,
            "memory_fraction": shared.memory_source
            or (_ELEMENTWISE if self.generation is AMPERE else f"by analogy with A100: {_ELEMENTWISE}"),
            "attention_fraction": _ATTENTION if self.generation is AMPERE else f"by analogy with A100: {_ATTENTION}",
            "reserved_bytes": _RUNTIME if compiled else _RESERVED,
            "usable_fraction": _COMPILED if compiled else _USABLE,
        }
        if not compiled:
            sources["spread"] = _SPREAD_SOURCE
        if shared.hours_between_failures is not None:
            sources["hours_between_failures"] = analogy + shared.failure_source
        if shared.tiles:
            sources["tiles"] = analogy + shared.tiles_source
        if shared.attention:
            sources["attention_kernels"] = analogy + shared.attention_source
            if self._products() < shared.attention_products:
                sources["attention_kernels"] += "; less by what the power limit takes of products"
        if shared.eight_bit_source and self.fp8:
            sources["matrix"] += f"; of eight bits {shared.eight_bit_source}"
        if self._products() < shared.curve.fraction:
            sources["matrix"] += f"; at most {shared.flops_per_watt or 0.0:.3g} FLOP/s a watt: {shared.power_source}"
        if shared.vector_source and self.fp32:
            sources["matrix"] += f"; of fp32 {shared.vector_source}"
        return DeviceSpec(
            name=self.name,
            kind=self.kind,
            memory_bytes=self.memory_gib * GIB,
            memory_bandwidth=self.bandwidth_gb * 1e9,
            peak_flops=self.peaks,
            matrix={precision: self._curve(precision) for precision in self.peaks},
            tiles=self._tiles(),
            spread=0.0 if compiled else _SPREAD,
            memory_fraction=shared.memory_fraction,
            attention_kernels=self._attention(),
            launch_seconds=shared.launch_seconds,
            reserved_bytes=(0.25 if compiled else 0.87) * GIB,
            usable_fraction=1.0 if compiled else 0.94,
            hours_between_failures=shared.hours_between_failures,
            watts=self.watts,
            sources=sources,
        )
