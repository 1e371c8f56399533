"""Devices by name. Peaks are dense, without sparsity; `sources` of each says where its numbers are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from meshwright.catalog.device_curves import AMD, AMPERE, BLACKWELL, HOPPER, OLDER, Generation
from meshwright.catalog.names import normal
from meshwright.spec.cluster import DeviceKind, DeviceSpec, MatrixCurve, MatrixTiles, Precision

GIB = 2.0**30

_MEMORY = "total memory as PyTorch reports it, rounded"
_RESERVED = "a CUDA context of about 0.5 GiB and one set of NCCL buffers of 0.34 to 0.39 GiB"
_ELEMENTWISE = "0.7 of the data sheet's bandwidth reproduces the step times of 2104.04473, table 1, within 9 %"
_ATTENTION = "fused attention at half of peak forward, 0.4 backward: the same fit; not measured by itself"
_USABLE = "memory in use over memory reserved as SimuMax measures it on B200"


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
    watts: float
    fp16: float
    fp32: float
    bf16: float | None = None
    tf32: float | None = None
    fp8: float | None = None
    nvfp4: float | None = None
    fp64: float | None = None
    aliases: tuple[str, ...] = ()
    kind: DeviceKind = DeviceKind.CUDA
    units: int | None = None

    @property
    def peaks(self) -> dict[Precision, float]:
        """By precision; scales for blocks of elements take nothing from the peak of eight bits."""
        scaled = self.fp8 if self.generation is BLACKWELL else None
        own = {precision: getattr(self, precision.value, None) for precision in Precision}
        peaks = own | {Precision.FP8_BLOCK: self.fp8, Precision.MXFP8: scaled}
        return {precision: peak * 1e12 for precision, peak in peaks.items() if peak}

    def _sustained(self) -> float:
        """The share of the peak that the board's power limit sustains; 1 where nobody measured it."""
        each = self.generation.flops_per_watt
        return 1.0 if each is None else min(1.0, each * self.watts / (self.fp16 * 1e12))

    def _curve(self) -> MatrixCurve:
        curve = self.generation.curve
        return replace(curve, fraction=min(curve.fraction, self._sustained()))

    def _tiles(self) -> MatrixTiles | None:
        tiles = self.generation.tiles
        return replace(tiles, units=self.units or tiles.units) if tiles else None

    def device(self) -> DeviceSpec:
        """The device, each of its numbers with a source."""
        shared = self.generation
        analogy = "" if self.name == shared.measured or not shared.measured else f"by analogy with {shared.measured}: "
        sources = {
            "peak_flops": f"{self.title}, dense",
            "memory_bandwidth": self.title,
            "watts": self.title,
            "memory_bytes": _MEMORY,
            "matrix": analogy + shared.curve_source,
            "launch_seconds": analogy + shared.launch_source,
            "memory_fraction": _ELEMENTWISE if self.generation is AMPERE else f"by analogy with A100: {_ELEMENTWISE}",
            "attention_fraction": _ATTENTION if self.generation is AMPERE else f"by analogy with A100: {_ATTENTION}",
            "reserved_bytes": _RESERVED,
            "usable_fraction": _USABLE,
        }
        if shared.hours_between_failures is not None:
            sources["hours_between_failures"] = analogy + shared.failure_source
        if shared.tiles:
            sources["tiles"] = analogy + shared.tiles_source
        if shared.attention:
            sources["attention_kernels"] = analogy + shared.attention_source
        if self._sustained() < shared.curve.fraction:
            sources["matrix"] += f"; at most {shared.flops_per_watt or 0.0:.3g} FLOP/s a watt: {shared.power_source}"
        return DeviceSpec(
            name=self.name,
            kind=self.kind,
            memory_bytes=self.memory_gib * GIB,
            memory_bandwidth=self.bandwidth_gb * 1e9,
            peak_flops=self.peaks,
            matrix=dict.fromkeys(self.peaks, self._curve()),
            tiles=self._tiles(),
            memory_fraction=0.7,
            attention_kernels=shared.attention,
            launch_seconds=shared.launch_seconds,
            reserved_bytes=0.87 * GIB,
            hours_between_failures=shared.hours_between_failures,
            watts=self.watts,
            sources=sources,
        )


def _ampere(
    name: str, title: str, *, gib: float, bandwidth_gb: float, watts: float, aliases: tuple[str, ...] = ()
) -> Sheet:
    return Sheet(
        name=name,
        generation=AMPERE,
        title=title,
        memory_gib=gib,
        bandwidth_gb=bandwidth_gb,
        watts=watts,
        fp16=312,
        bf16=312,
        tf32=156,
        fp32=19.5,
        fp64=19.5,
        aliases=aliases,
    )


def _hopper(name: str, title: str, *, gib: float, bandwidth_gb: float, aliases: tuple[str, ...] = ()) -> Sheet:
    return Sheet(
        name=name,
        generation=HOPPER,
        title=title,
        memory_gib=gib,
        bandwidth_gb=bandwidth_gb,
        watts=700,
        fp16=989.4,
        bf16=989.4,
        fp8=1978.9,
        tf32=494.7,
        fp32=66.9,
        fp64=66.9,
        aliases=aliases,
    )


def _volta(name: str, *, gib: float, aliases: tuple[str, ...] = ()) -> Sheet:
    return Sheet(
        name=name,
        generation=OLDER,
        title="NVIDIA V100 SXM2 data sheet",
        memory_gib=gib,
        bandwidth_gb=900,
        watts=300,
        fp16=125,
        fp32=15.7,
        fp64=7.8,
        aliases=aliases,
    )


SHEETS = (
    _hopper("H100", "NVIDIA H100 SXM5 data sheet", gib=79.1, bandwidth_gb=3350, aliases=("H100-SXM", "H100-80GB")),
    replace(
        _hopper(
            "H100-96GB",
            "torchtitan docs/performance.md: 96 GB HBM2e, 2.4 TB/s, 500 W",
            gib=95,
            bandwidth_gb=2400,
            aliases=("H100-96GB-HBM2e",),
        ),
        watts=500,
    ),
    Sheet(
        name="H100-PCIe",
        generation=HOPPER,
        title="NVIDIA H100 PCIe data sheet",
        memory_gib=79.1,
        bandwidth_gb=2000,
        watts=350,
        fp16=756,
        bf16=756,
        fp8=1513,
        tf32=378,
        fp32=51,
        fp64=51,
    ),
    _hopper("H200", "NVIDIA H200 SXM data sheet", gib=139.8, bandwidth_gb=4800, aliases=("H200-SXM", "H200-141GB")),
    Sheet(
        name="B200",
        generation=BLACKWELL,
        title="NVIDIA HGX B200 data sheet",
        memory_gib=178,
        bandwidth_gb=8000,
        watts=1000,
        fp16=2250,
        bf16=2250,
        fp8=4500,
        nvfp4=9000,
        tf32=1125,
        fp32=75,
        fp64=37,
    ),
    Sheet(
        name="GB200",
        generation=BLACKWELL,
        title="NVIDIA GB200 NVL72 data sheet, one GPU of 72",
        memory_gib=184,
        bandwidth_gb=8000,
        watts=1200,
        fp16=2500,
        bf16=2500,
        fp8=5000,
        nvfp4=10000,
        tf32=1250,
        fp32=80,
        fp64=40,
    ),
    _ampere(
        "A100-80GB",
        "NVIDIA A100 80GB SXM data sheet",
        gib=79.15,
        bandwidth_gb=2039,
        watts=400,
        aliases=("A100", "A100-80", "A100-SXM", "A100-SXM-80GB", "A100-80GB-SXM"),
    ),
    _ampere(
        "A100-40GB",
        "NVIDIA A100 40GB SXM data sheet",
        gib=39.4,
        bandwidth_gb=1555,
        watts=400,
        aliases=("A100-40", "A100-SXM-40GB", "A100-40GB-SXM"),
    ),
    _ampere(
        "A100-80GB-PCIe",
        "NVIDIA A100 80GB PCIe data sheet",
        gib=79.15,
        bandwidth_gb=1935,
        watts=300,
        aliases=("A100-PCIe", "A100-PCIe-80GB"),
    ),
    _ampere(
        "A100-40GB-PCIe",
        "NVIDIA A100 40GB PCIe data sheet",
        gib=39.4,
        bandwidth_gb=1555,
        watts=250,
        aliases=("A100-PCIe-40GB",),
    ),
    _volta("V100-32GB", gib=31.7, aliases=("V100", "V100-32")),
    _volta("V100-16GB", gib=15.8, aliases=("V100-16",)),
    Sheet(
        name="T4",
        generation=OLDER,
        title="NVIDIA T4 data sheet",
        memory_gib=14.7,
        bandwidth_gb=320,
        watts=70,
        fp16=65,
        fp32=8.1,
        aliases=("T4-16GB", "Tesla-T4"),
    ),
    Sheet(
        name="A10G",
        generation=OLDER,
        title="NVIDIA A10G data sheet",
        memory_gib=22.1,
        bandwidth_gb=600,
        watts=300,
        fp16=70,
        bf16=70,
        tf32=35,
        fp32=35,
        aliases=("A10G-24GB",),
    ),
    Sheet(
        name="L4",
        generation=OLDER,
        title="NVIDIA L4 data sheet",
        memory_gib=22.0,
        bandwidth_gb=300,
        watts=72,
        fp16=121,
        bf16=121,
        fp8=242.5,
        tf32=60,
        fp32=30.3,
    ),
    Sheet(
        name="L40S",
        generation=OLDER,
        title="NVIDIA L40S data sheet",
        memory_gib=44.4,
        bandwidth_gb=864,
        watts=350,
        fp16=362,
        bf16=362,
        fp8=733,
        tf32=183,
        fp32=91.6,
    ),
    Sheet(
        name="RTX-4090",
        generation=OLDER,
        title="NVIDIA Ada architecture paper, GeForce RTX 4090, accumulating in fp32",
        memory_gib=23.6,
        bandwidth_gb=1008,
        watts=450,
        fp16=165.2,
        bf16=165.2,
        fp8=330.3,
        tf32=82.6,
        fp32=82.6,
        aliases=("4090", "GeForce-RTX-4090"),
    ),
    Sheet(
        name="RTX-3090",
        generation=OLDER,
        title="NVIDIA GA102 architecture paper, GeForce RTX 3090, accumulating in fp32",
        memory_gib=23.7,
        bandwidth_gb=936,
        watts=350,
        fp16=71,
        bf16=71,
        tf32=35.6,
        fp32=35.6,
        aliases=("3090", "GeForce-RTX-3090"),
    ),
    Sheet(
        name="MI250X-GCD",
        generation=AMD,
        title="AMD Instinct MI250X data sheet, one of its two dies",
        memory_gib=63.98,
        bandwidth_gb=1638,
        watts=280,
        fp16=191.5,
        bf16=191.5,
        fp32=47.9,
        fp64=47.9,
        aliases=("MI250X",),
        kind=DeviceKind.ROCM,
    ),
    Sheet(
        name="MI300X",
        generation=AMD,
        title="AMD Instinct MI300X data sheet",
        memory_gib=191.5,
        bandwidth_gb=5300,
        watts=750,
        fp16=1307.4,
        bf16=1307.4,
        fp8=2614.9,
        tf32=653.7,
        fp32=163.4,
        fp64=163.4,
        aliases=("MI300",),
        kind=DeviceKind.ROCM,
    ),
)


@cache
def devices() -> Mapping[str, DeviceSpec]:
    """Every device preset by its name."""
    return MappingProxyType({sheet.name: sheet.device() for sheet in SHEETS})


def find_device(name: str) -> DeviceSpec | None:
    """The device that `name` means, whatever its case and punctuation; None when there is none."""
    key = normal(name)
    for sheet in SHEETS:
        if key in (normal(sheet.name), *map(normal, sheet.aliases)):
            return devices()[sheet.name]
    return None
