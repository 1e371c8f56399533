"""What devices of one generation share: the curve of matrix products, the cost of a launch, how often they fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.spec.cluster import AttentionKernel, AttentionShare, MatrixCurve, MatrixTiles, Precision

EVERYWHERE = (AttentionKernel.FLASH_1, AttentionKernel.FLASH_2, AttentionKernel.NATIVE)
LLAMA3_HOURS_BETWEEN_FAILURES = 16384 * 54 * 24 / 419
RSC1_HOURS_BETWEEN_FAILURES = 8 * 24 * 1000 / 6.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """`measured` is the device whose products were measured; every other device is like it by analogy, but for
    long products of those `beside`, which were measured too.

    `flops_per_watt` is what bf16 products sustain of the board's power limit, where that is less than their curve; so
    do those of tf32 and eight bits in proportion to their peaks. Vector units, which multiply fp32 and fp64, take other
    energy: `vector_fraction` is what products reach of their peak, where it is not that of the curve, and
    `vector_flops_per_watt` what they sustain.
    Shares in `attention` were measured where products sustain `attention_products` of the peak: a board whose power
    limit sustains less loses as much of them. 0 where nothing is known of power.
    `eight_bit` is the share of its peak that the best product of eight bits reaches, over that of the best in bf16.
    `narrow` says how many times the FLOPs of bf16 a joule does in other precisions, where that was measured; elsewhere
    the power limit takes the same share of every peak. `memory_fraction` is what element-wise work reaches of the
    bandwidth; without a `memory_source` that is A100's.
    """

    measured: str
    curve: MatrixCurve
    curve_source: str
    launch_seconds: float
    launch_source: str
    tiles: MatrixTiles | None = None
    tiles_source: str = ""
    attention: Mapping[AttentionKernel, AttentionShare] = field(default_factory=dict)
    attention_source: str = ""
    attention_products: float = 0.0
    eight_bit: float = 1.0
    eight_bit_source: str = ""
    flops_per_watt: float | None = None
    power_source: str = ""
    vector_fraction: float | None = None
    vector_flops_per_watt: float | None = None
    vector_source: str = ""
    narrow: Mapping[Precision, float] = field(default_factory=dict)
    memory_fraction: float = 0.7
    memory_source: str = ""
    hours_between_failures: float | None = None
    failure_source: str = ""
    beside: tuple[str, ...] = ()


# zzc0721/torch-performance-test-data on GitHub: tables of its issues, and of pull request 15 for RTX 5090.
TORCH_PRODUCTS = "torch products of 4,096 to 10,240 (tables of GitHub's zzc0721, 2025 to 2026)"
_SUSTAINED = (
    "products of Llama 70B's training, caches cleared between them (SemiAnalysis, MI300X vs H100 vs H200, "
    "December 2024, read in a translation)"
)
_MAMF = "best product found by MAMF (table of ml-engineering, S. Bekman)"
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_ODDEST = 0.25  # of rows that are multiples of 2 bytes alone; 8 and 4 bytes lie evenly between it and 1, by ratios
_MISALIGNED = round(_ODDEST ** (1 / 3), 2), round(_ODDEST ** (2 / 3), 2), _ODDEST
_ODD = (
    "gradients of a head of 50,257 columns, whose rows are multiples of 2 bytes alone, run at 58 TFLOP/s and not 235 "
    "(what grows with a microbatch's tokens and width in vTrain's A100 tables, whose module does not pad); multiples "
    "of 4 and 8 bytes taken to lie evenly between"
)

_HOPPER_ELEMENTWISE = (
    "0.55 of the data sheet's bandwidth is the median of what step times of six sources ask for on H100 (0.4 to 0.8), "
    "whichever is left out; one plain kernel reaches 0.91 there (fp8 casts of aiconfigurator 0.12.0)"
)
_A100_FLASH = AttentionShare(forward=0.69, backward=0.53, forward_half=192, backward_half=75, block=128)

AMPERE = Generation(
    measured="A100-80GB",
    curve=MatrixCurve(fraction=0.827, half_m=99.6, half_n=99.6, half_k=105.0),
    curve_source="fit to half of 16,200 bf16 products measured on A100 SXM (tables of aiconfigurator 0.12.0); on the "
    "other half the mean error is 8.7 %, the median 6.0 %",
    launch_seconds=6.3e-6,
    launch_source="intercept of that fit",
    tiles=MatrixTiles(
        units=108, sizes=_TILES, load=23.2, depth=42, step=32, tail=0.65, store=0.50, misaligned=_MISALIGNED
    ),
    tiles_source="fit to 183 bf16 products of A100 PCIe, weight gradients added in fp32 among them (SimuMax's table), "
    f"mean error 3.1 %, median 1.2 %; multiprocessors from the data sheet; {_ODD}",
    attention={
        AttentionKernel.FLASH_1: AttentionShare(forward=0.38, backward=0.29),
        AttentionKernel.FLASH_2: _A100_FLASH,
        AttentionKernel.NATIVE: _A100_FLASH,
    },
    attention_source="fit to SimuMax's table of A100 PCIe, heads of 128 features, 4 to 64 of them at 4,096 tokens, "
    "mean error 2.2 %; the first version 25 to 40 % of peak (2307.08691)",
    attention_products=0.775,
    flops_per_watt=0.806e12,
    power_source="bf16 products of A100 PCIe, 300 W, sustain 0.775 of peak in SimuMax's table; with 250 W 198 to 241 "
    f"TFLOP/s, 97 to 108 in tf32 ({TORCH_PRODUCTS})",
    vector_fraction=0.95,
    vector_source="19.1 of 19.5 TFLOP/s are the best of A100 and A800 SXM, 16.7 and 17.6 those of A100 PCIe of 40 GB "
    f"({TORCH_PRODUCTS})",
    hours_between_failures=RSC1_HOURS_BETWEEN_FAILURES,
    failure_source="2410.21680: 6.5 failures in a thousand days of a node of 8 A100, the first research cluster",
)
HOPPER = Generation(
    measured="H100",
    curve=MatrixCurve(fraction=0.842, half_m=13.5, half_n=13.5, half_k=168.0),
    curve_source="fit to half of 16,200 bf16 products measured on H100 SXM (tables of aiconfigurator 0.12.0); on the "
    "other half the mean error is 7.6 %, the median 5.3 %",
    launch_seconds=3.3e-6,
    launch_source="intercept of that fit",
    attention={
        AttentionKernel.FLASH_1: AttentionShare(forward=0.22, backward=0.17),
        AttentionKernel.FLASH_2: AttentionShare(
            forward=0.40, backward=0.32, forward_half=235, backward_half=91, block=128
        ),
        AttentionKernel.NATIVE: AttentionShare(
            forward=0.69, backward=0.54, forward_half=235, backward_half=91, block=128, half_dim=33
        ),
    },
    attention_source="2407.08608: the second version reaches 35 % of peak on H100, the third up to 75 %, causal less; "
    "the first in proportion to A100; shares of causal attention taken from that, not measured; blocks as on A100 in "
    "proportion to the multiprocessors; heads of 64 features reach 0.83 of the FLOP/s of 128 (causal prefill of more "
    "than 1 ms in three engines' tables, aiconfigurator 0.12.0)",
    tiles=MatrixTiles(
        units=132, sizes=_TILES, load=23.2, depth=97, step=64, tail=0.65, store=0.157, misaligned=_MISALIGNED
    ),
    tiles_source="multiprocessors from the data sheet, tiles and waves by analogy with A100; results are stored beside "
    "the next tile's work as on B200, and the depth is what that leaves of the curve's half_k; misaligned as on A100",
    attention_products=720 / 989.4,
    eight_bit=0.709 / 0.803,
    eight_bit_source=f"{_MAMF}: 1,402.6 of 1,979 TFLOP/s in fp8, 794.5 of 989 in bf16 on H100",
    flops_per_watt=720e12 / 700,
    power_source=f"{_SUSTAINED}: 720 of 989 TFLOP/s in bf16 on H100 and H200, 700 W",
    vector_fraction=0.78,
    vector_source="the best of H100 and H200 are 52.1 and 51.3 of 66.9 TFLOP/s, 36.9 of 51 on H100 PCIe, 32 of 44 on "
    f"H20 ({TORCH_PRODUCTS})",
    memory_fraction=0.55,
    memory_source=_HOPPER_ELEMENTWISE,
    hours_between_failures=LLAMA3_HOURS_BETWEEN_FAILURES,
    failure_source="Llama 3, 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100",
)
_BY_H100 = "by analogy with H100: "
HOPPER_H20 = replace(
    HOPPER,
    measured="H20",
    curve=replace(HOPPER.curve, fraction=0.97),
    curve_source="by analogy with H100 but for its height: 141.9 and 142.3 of 148 TFLOP/s are the best of H20 "
    f"({TORCH_PRODUCTS}); {HOPPER.curve_source}",
    launch_source=_BY_H100 + HOPPER.launch_source,
    tiles=HOPPER.tiles and replace(HOPPER.tiles, units=78),
    tiles_source=_BY_H100 + HOPPER.tiles_source,
    failure_source=_BY_H100 + HOPPER.failure_source,
    attention={
        AttentionKernel.FLASH_1: AttentionShare(forward=0.34, backward=0.26),
        AttentionKernel.FLASH_2: AttentionShare(
            forward=0.62, backward=0.50, forward_half=50, backward_half=19, block=128
        ),
        AttentionKernel.NATIVE: AttentionShare(
            forward=0.92, backward=0.72, forward_half=50, backward_half=19, block=128
        ),
    },
    attention_source="forward of two sequences of 2,048 tokens, 16 heads of 128 features, on H20: 129 (cuDNN) and 126 "
    "(third version) of 148 TFLOP/s, 108 causal; 84 and 66 of the second version; heads of 64 are as fast, for there "
    "exponentials hold nothing up (flash-attention, issue 1310); backward and the first version in proportion to H100",
    attention_products=0.0,
)
_BLACKWELL_NATIVE = AttentionShare(
    forward=0.55, backward=0.45, forward_half=370, backward_half=124, block=128, half_dim=149
)
BLACKWELL = Generation(
    measured="B200",
    beside=("B300", "GB200", "GB300"),
    curve=MatrixCurve(fraction=0.776, half_m=80.0, half_n=80.0, half_k=200.0),
    curve_source=f"{_MAMF} of B200: 1,745 of 2,250 TFLOP/s at full clock; halves a fit to 514 bf16 products of B200 "
    "(SimuMax's table)",
    launch_seconds=3.3e-6,
    launch_source="by analogy with H100",
    attention={
        AttentionKernel.FLASH_1: AttentionShare(forward=0.10, backward=0.08),
        AttentionKernel.FLASH_2: AttentionShare(forward=0.155, backward=0.13),
        AttentionKernel.NATIVE: _BLACKWELL_NATIVE,
    },
    attention_source="fit to SimuMax's table of B200, heads of 128 features, 8 to 128 of them at 4,096 to 131,072 "
    "tokens; older kernels at their FLOP/s on H100; heads of 64 features reach 0.65 of the FLOP/s of 128 (causal "
    "prefill of more than 1 ms in three engines' tables, aiconfigurator 0.12.0)",
    attention_products=1.2e12 * 1000 / 2250e12,
    tiles=MatrixTiles(
        units=148, sizes=_TILES, load=0, depth=40, step=64, tail=0.5, store=0.157, cold=0.786, misaligned=_MISALIGNED
    ),
    tiles_source="fit to 514 bf16 products of B200 (SimuMax's table); experts one by one wait for their weights, "
    "36 shapes of it within 10.4 %; multiprocessors from the data sheet; misaligned as on A100",
    eight_bit=0.763 / 0.776,
    eight_bit_source=f"{_MAMF}: 3,432.5 of 4,500 TFLOP/s in fp8, 1,745 of 2,250 in bf16 on B200",
    flops_per_watt=1.2e12,
    power_source="bf16 products of more than 10 ms on B200, B300, GB200 and GB300 sustain 1.34, 1.26, 1.14 and 1.21e12 "
    "FLOP/s a watt (medians of aiconfigurator 0.12.0's tables, trtllm and sglang), on SimuMax's B200 1.15e12: their "
    "mean; fewer bits from Transformer Engine's products on B300, quantised before (docs/examples/gemm_profiling)",
    vector_fraction=0.9,
    vector_source=f"66.2 of 75 TFLOP/s are the best of B200 ({TORCH_PRODUCTS})",
    memory_fraction=0.55,
    memory_source="as on H100; on B200 plain kernels reach 0.67, permutations 0.50 and the loss 0.32 (SimuMax's table)",
    narrow={
        **dict.fromkeys((Precision.FP8, Precision.FP8_ROW), 13.10 / 6.81),
        **dict.fromkeys((Precision.MXFP8, Precision.FP8_BLOCK), 13.10 / 7.16),
        Precision.NVFP4: 13.10 / 3.764,
    },
)
# Blackwell Ultra has twice the exponentials a clock (NVIDIA). Backward computes those of forward again.
_ULTRA_FORWARD = 1.25
_SAVED = (1.0 - 1.0 / _ULTRA_FORWARD) / _BLACKWELL_NATIVE.forward  # of the time of forward's two products at the peak
_ULTRA_BACKWARD = 1.0 / (1.0 - _SAVED * _BLACKWELL_NATIVE.backward / 2.5)
BLACKWELL_ULTRA = replace(
    BLACKWELL,
    attention={
        **BLACKWELL.attention,
        AttentionKernel.NATIVE: replace(
            _BLACKWELL_NATIVE,
            forward=_BLACKWELL_NATIVE.forward * _ULTRA_FORWARD,
            backward=_BLACKWELL_NATIVE.backward * _ULTRA_BACKWARD,
        ),
    },
    attention_source=f"{BLACKWELL.attention_source}; by heads of 128 features B300 and GB300 are 1.16 to 1.35 times as "
    "fast in it as B200 and GB200 (1.25 here); backward, not measured, saves as much time",
    attention_products=1.2e12 * 1100 / 2250e12,
)
_OLDER_CURVE = MatrixCurve(fraction=0.8, half_m=99.6, half_n=99.6, half_k=105.0)
_OLDER_TILES = MatrixTiles(
    units=84, sizes=_TILES, load=23.2, depth=42, step=32, tail=0.65, store=0.50, misaligned=_MISALIGNED
)
_BY_A100 = "by analogy with A100; not measured"
OLDER = Generation(
    measured="",
    curve=_OLDER_CURVE,
    curve_source=_BY_A100,
    launch_seconds=6.3e-6,
    launch_source="by analogy with A100",
    tiles=_OLDER_TILES,
    tiles_source=f"multiprocessors from the data sheet, the rest {_BY_A100}",
)


_AMD_ELEMENTWISE = (
    "0.55 as on H100 and B200, by analogy; plain streams reach 0.78 on MI300X (Azure's AI benchmarking guide) and 0.9 "
    "on A100, where 0.7 is what such work reaches"
)
_HIPKITTENS = "causal attention of MI355X, 16 sequences of 1,024 to 16,384 tokens (HazyResearch/HipKittens, analysis)"
_AMD_ATTENTION = (
    f"{_HIPKITTENS}: AITER's assembly 876 to 1,247 TFLOP/s forward and 673 to 1,109 backward from 2,048 tokens on, "
    "FlashAttention 2 of Composable Kernel 611 to 903 and 375 to 541, PyTorch's own (AOTriton) 246 to 789 and 110 to "
    "259; heads of 64 features 0.65 and 0.90 of 128 forward; other devices in proportion to their products, as "
    "FlashAttention 2 of MI300X is (328.6 TFLOP/s forward with heads of 64 features, Azure's AI benchmarking guide)"
)
# TFLOP/s of long sequences of MI355X.
_COMPOSABLE_KERNEL = AttentionShare(forward=933.0, backward=567.0, block=800, half_dim=15)
_AITER = AttentionShare(forward=1322.0, backward=1190.0, forward_half=20, backward_half=60, block=1000, half_dim=149)
_AOTRITON = AttentionShare(forward=978.0, backward=321.0, block=3936)
_AMD_KERNELS = {
    AttentionKernel.FLASH_1: _COMPOSABLE_KERNEL,
    AttentionKernel.FLASH_2: _COMPOSABLE_KERNEL,
    AttentionKernel.NATIVE: _AITER,
    AttentionKernel.TRITON: _AOTRITON,
}
_LASTING = 620 / 782  # of the best product of MI300X, products of a model one after the other
_MI355X_LASTING = 1565 / 2516.6 * _LASTING


def _measured(
    *, lasting: float, name: str, units: int, sizes: tuple[tuple[int, int], ...], best: str, **more: Any
) -> Generation:
    """`lasting` is the share of the peak that products reach one after the other, and so that of the curve; `more` are
    fields of a Generation."""
    scale = lasting / (_MI355X_LASTING * 2516.6)
    fused = {
        kernel: replace(share, forward=share.forward * scale, backward=share.backward * scale)
        for kernel, share in _AMD_KERNELS.items()
    }
    return replace(
        OLDER,
        measured=name,
        curve=replace(_OLDER_CURVE, fraction=lasting),
        curve_source=f"{best}; halves by analogy with A100",
        tiles=replace(_OLDER_TILES, units=units, sizes=sizes, tail=0.0),
        tiles_source="compute units from the data sheet; the last wave is split (Stream-K, 2301.03598, as hipBLASLt "
        f"has it), the rest {_BY_A100}",
        attention=fused,
        attention_source=_AMD_ATTENTION,
        attention_products=lasting,
        memory_fraction=0.55,
        memory_source=_AMD_ELEMENTWISE,
        **more,
    )


_BY_MI300X = "products one after the other reach 0.79 of that, by analogy with MI300X"
CDNA2 = _measured(
    lasting=147.0 / 191.5 * _LASTING,
    name="MI250X-GCD",
    units=110,
    sizes=_TILES,
    best=f"{_MAMF}: 147.0 of 191.5 TFLOP/s; {_BY_MI300X}",
)
CDNA3 = _measured(
    lasting=620 / 1307.4,
    name="MI300X",
    units=304,
    sizes=((256, 256), *_TILES),
    best=f"620 of 1,307 TFLOP/s, {_SUSTAINED}, of a best of 781.9",
    eight_bit=(990 / 2614.9) / (620 / 1307.4),
    eight_bit_source=f"{_SUSTAINED}: 990 of 2,615 TFLOP/s in fp8, 620 of 1,307 in bf16 on MI300X",
    flops_per_watt=620e12 / 750,
    power_source=f"{_SUSTAINED}: 620 of 1,307 TFLOP/s in bf16 on MI300X, 750 W",
)
_TYPICAL = "ten products of DeepSeek-V3, 30 s each, one after the other (AMD's Typical Attained FLOPs, September 2026)"
CDNA3_1000_WATTS = _measured(
    lasting=667 / 1307.4,
    name="MI325X",
    units=304,
    sizes=((256, 256), *_TILES),
    best=f"616 TFLOP/s of {_TYPICAL}, which is 667 of large ones; its best is 784.9 ({_MAMF})",
    eight_bit=(1275 / 2614.9) / (667 / 1307.4),
    eight_bit_source=f"1,143 TFLOP/s in fp8 of {_TYPICAL}, which is 1,275 of large ones",
)
CDNA4 = _measured(
    lasting=_MI355X_LASTING,
    name="MI355X",
    units=256,
    sizes=((256, 256), *_TILES),
    best=f"{_MAMF}: 1,565 of 2,517 TFLOP/s; {_BY_MI300X}",
    eight_bit=(3293 / 5033.2) / (1579 / 2516.6),
    eight_bit_source="3,293 TFLOP/s of 16,384 square in fp8, 1,579 in bf16 (hipBLASLt in HazyResearch/HipKittens)",
)


# The splash kernel pads heads to lanes of 128 (jax.experimental.pallas.ops.tpu.splash_attention): as slow as those.
_SPLASH = AttentionShare(forward=0.5, backward=0.4, half_dim=1e6)


def _systolic(side: int) -> Generation:
    """A matrix unit of `side` by `side`: rows come eight at a time, both other dims in whole sides, nothing waits."""
    return Generation(
        measured="",
        curve=MatrixCurve(fraction=0.8, half_m=0.0, half_n=0.0, half_k=0.0),
        curve_source="what MaxText's runs of December 2023 on v4, v5e and v5p ask for (docs/lab.md); products alone "
        "reach 0.90 of v6e and 0.83 of TPU7x (AI-Hypercomputer/tpu-recipes microbenchmarks)",
        launch_seconds=0.0,
        launch_source="a step is one compiled program",
        attention=dict.fromkeys(EVERYWHERE, _SPLASH),
        attention_source="shares of heads of 128 features by analogy with A100; narrower ones are padded to lanes of "
        "128 (jax's splash attention)",
        tiles=MatrixTiles(units=1, sizes=((8, side),), load=0.0, depth=0.0, step=side, tail=0.0, store=0.0),
        tiles_source=f"matrix units of {side} by {side} (Google Cloud, TPU system architecture)",
    )


MXU_128, MXU_256 = _systolic(128), _systolic(256)
