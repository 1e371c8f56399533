"""Accelerators of AMD and Google, data sheet by data sheet."""

from __future__ import annotations

from meshwright.catalog.device_curves import CDNA2, CDNA3, CDNA3_1000_WATTS, CDNA4, MXU_128, MXU_256
from meshwright.catalog.device_sheet import Sheet
from meshwright.spec.cluster import DeviceKind

_MI300X = Sheet(
    name="MI300X",
    generation=CDNA3,
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
)
_MI250X = Sheet(
    name="MI250X-GCD",
    generation=CDNA2,
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
)
_MI355X = Sheet(
    name="MI355X",
    generation=CDNA4,
    title="AMD Instinct MI355X data sheet",
    memory_gib=287.5,
    bandwidth_gb=8000,
    watts=1400,
    fp16=2516.6,
    bf16=2516.6,
    fp8=5033.2,
    mxfp8=5033.2,
    fp32=157.3,
    fp64=78.6,
    aliases=("MI355",),
    kind=DeviceKind.ROCM,
)
_TPU_V3 = Sheet(
    name="TPU-v3",
    generation=MXU_128,
    title="Google Cloud TPU v3, one chip of two cores (system architecture; power: 2104.10350)",
    memory_gib=32,
    bandwidth_gb=900,
    watts=450,
    bf16=123,
    aliases=("TPUv3", "v3"),
    kind=DeviceKind.TPU,
)
_TPU_V2 = _TPU_V3.variant(
    name="TPU-v2",
    title="Google Cloud TPU v2, one chip of two cores (10.1145/3360307)",
    memory_gib=16,
    bandwidth_gb=700,
    watts=280,
    bf16=46,
    aliases=("TPUv2", "v2"),
)
_TPU_V6E = _TPU_V3.variant(
    name="TPU-v6e",
    title="Google Cloud TPU v6e system architecture",
    generation=MXU_256,
    bandwidth_gb=1640,
    watts=None,
    bf16=918,
    aliases=("TPUv6e", "v6e", "Trillium", "TPU-Trillium"),
)

# FLOP/s of products of whole numbers in eight bits, by the same pages; plans have none (Precision.multiplies).
INT8_PEAKS = {"TPU-v5e": 394e12, "TPU-v5p": 918e12, "TPU-v6e": 1836e12}


def _core(chip: Sheet) -> Sheet:
    """One of the two cores of a chip, as papers of the time count devices."""
    return chip.variant(
        name=f"{chip.name}-core",
        title=f"{chip.title}: one core of two",
        memory_gib=chip.memory_gib / 2,
        bandwidth_gb=chip.bandwidth_gb / 2,
        watts=chip.watts / 2 if chip.watts else None,
        bf16=chip.bf16 / 2 if chip.bf16 else None,
    )


OTHERS = (
    _MI250X,
    _MI250X.variant(
        name="MI250-GCD",
        title="AMD Instinct MI250 data sheet, one of its two dies",
        fp16=181,
        bf16=181,
        fp32=45.3,
        fp64=45.3,
        aliases=("MI250",),
        units=104,
    ),
    _MI250X.variant(
        name="MI210",
        title="AMD Instinct MI210 data sheet",
        watts=300,
        fp16=181,
        bf16=181,
        fp32=45.3,
        fp64=45.3,
        units=104,
    ),
    _MI300X,
    _MI300X.variant(
        name="MI325X",
        generation=CDNA3_1000_WATTS,
        title="AMD Instinct MI325X data sheet",
        memory_gib=255.5,
        bandwidth_gb=6000,
        watts=1000,
        aliases=("MI325",),
    ),
    _MI300X.variant(
        name="MI300A",
        title="AMD Instinct MI300A data sheet",
        memory_gib=127.5,
        watts=550,
        fp16=980.6,
        bf16=980.6,
        fp8=1961.2,
        tf32=490.3,
        fp32=122.6,
        fp64=122.6,
        units=228,
    ),
    _MI355X,
    _MI355X.variant(
        name="MI350X",
        title="AMD Instinct MI350X data sheet",
        watts=1000,
        fp16=2306.9,
        bf16=2306.9,
        fp8=4613.7,
        mxfp8=4613.7,
        fp32=144.2,
        fp64=72.1,
        aliases=("MI350",),
    ),
    _TPU_V2,
    _core(_TPU_V2),
    _TPU_V3,
    _core(_TPU_V3),
    _TPU_V3.variant(
        name="TPU-v4",
        title="Google TPU v4 (2304.01433)",
        bandwidth_gb=1228,
        watts=192,
        bf16=275,
        aliases=("TPUv4", "v4"),
    ),
    _TPU_V3.variant(
        name="TPU-v5e",
        title="Google Cloud TPU v5e system architecture",
        memory_gib=16,
        bandwidth_gb=819,
        watts=None,
        bf16=197,
        aliases=("TPUv5e", "v5e", "TPU-v5-lite", "TPU-v5litepod", "v5litepod"),
    ),
    _TPU_V3.variant(
        name="TPU-v5p",
        title="Google Cloud TPU v5p system architecture",
        memory_gib=95,
        bandwidth_gb=2765,
        watts=None,
        bf16=459,
        aliases=("TPUv5p", "v5p"),
    ),
    _TPU_V6E,
    _TPU_V6E.variant(
        name="TPU-v7",
        title="Google Cloud TPU7x (Ironwood) system architecture",
        memory_gib=192,
        bandwidth_gb=7370,
        bf16=2307,
        fp8=4614,
        units=2,  # cores, each a device of its own to XLA
        aliases=("TPUv7", "TPU7x", "Ironwood", "TPU-Ironwood"),
    ),
)
