"""What boards of one generation share where products were measured: Pascal, Volta, Turing, GA10x, Ada, RTX."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.device_curves import EVERYWHERE, OLDER, TORCH_PRODUCTS
from meshwright.spec.cluster import AttentionKernel, AttentionShare, MatrixCurve


def _products(fraction: float) -> MatrixCurve:
    """The curve of A100 with another best."""
    return replace(OLDER.curve, fraction=fraction)


def _attention(share: AttentionShare) -> dict[AttentionKernel, AttentionShare]:
    """Every kernel is the second version: nothing newer was written for these boards."""
    first = replace(share, forward=share.forward * 0.38 / 0.69, backward=share.backward * 0.29 / 0.53)
    return {AttentionKernel.FLASH_1: first, AttentionKernel.FLASH_2: share, AttentionKernel.NATIVE: share}


_HEIGHT = "by analogy with A100 but for its height"
_FIRST = "the first version in proportion to A100"
_TURING_SHARE = AttentionShare(forward=0.30, backward=0.22)
_VOLTA_SHARE = AttentionShare(forward=0.26, backward=0.19)
_NO_FLASH = "there is no FlashAttention: torch takes the memory-efficient kernel of xformers"

VOLTA = replace(
    OLDER,
    curve_source=f"{_HEIGHT}: 89 to 97 of 125 TFLOP/s on V100 SXM2 ({TORCH_PRODUCTS})",
    attention=dict.fromkeys(EVERYWHERE, _VOLTA_SHARE),
    attention_source=f"{_NO_FLASH}, on V100 in the median 5 % slower forward and 15 % backward than attention written "
    "out (xformers, pull request 362); that is 0.26 of the peak forward with 128 features a head and 0.19 backward "
    "with 64, two and four batched products with a softmax in one pass between them",
    vector_fraction=0.92,
    vector_source=f"13.9 to 14.5 of 15.7 TFLOP/s on V100 SXM2 ({TORCH_PRODUCTS})",
)
TURING = replace(
    OLDER,
    curve=_products(0.98),
    curve_source=f"{_HEIGHT}: 48 to 56 of 53.8 TFLOP/s on two RTX 2080 Ti ({TORCH_PRODUCTS})",
    attention=dict.fromkeys(EVERYWHERE, _TURING_SHARE),
    attention_source=f"{_NO_FLASH}, on T4 2.19 times as slow forward as a kernel that reaches 0.66 of the peak "
    "(flash-attention, pull request 2379); backward in proportion to V100",
    flops_per_watt=24e12 / 70,
    power_source="T4, 70 W, sustains 24 of 65 TFLOP/s over a hundred fp16 products of 4,096 (NVIDIA developer forum, "
    "thread 264462); 41.6 before its power cap slows it (1903.07486)",
    vector_fraction=0.96,
    vector_flops_per_watt=4.3e12 / 70,
    vector_source=f"12.8 of 13.4 TFLOP/s on RTX 2080 Ti; 4.2 to 4.4 of 8.1 the best of three T4 ({TORCH_PRODUCTS})",
)
GA10X = replace(
    OLDER,
    curve=_products(0.98),
    curve_source=f"{_HEIGHT}: 62.5, 66.1 and 69.5 of 70 TFLOP/s on A10G by size; 61 to 65 of 59.5 on RTX 3080, 75 to "
    f"77 of 71 the best of RTX 3090, whose clocks are above the data sheet's ({TORCH_PRODUCTS})",
    attention=_attention(AttentionShare(forward=0.755, backward=0.675, forward_half=149, backward_half=58, block=128)),
    attention_source="the second version on RTX A5000, 230 W, 64 features a head, 2,048 to 8,192 tokens: 81.6 of 111.1 "
    "TFLOP/s forward, 70 to 77 backward (gpu-mode/ring-attention, issue 10); blocks as on A100 in proportion to the "
    f"multiprocessors; {_FIRST}",
    attention_products=0.41e12 * 230 / 111.1e12,
    flops_per_watt=0.41e12,
    power_source="TFLOP/s of bf16 a watt where the power limit holds products back: 0.40 on RTX A2000 (70 W) and 0.41 "
    "on A4000 (140 W), 0.37 to 0.41 on A40, 0.41 the best of A6000 (both 300 W); tf32 reaches the same share of its "
    f"peak ({TORCH_PRODUCTS})",
    vector_fraction=0.70,
    vector_flops_per_watt=0.08e12,
    vector_source="22.4 to 23.4 of 35 TFLOP/s on A10G, 21 of 29.8 on RTX 3080, 24.8 of 35.6 the best of RTX 3090; a "
    "watt 0.063 to 0.085 TFLOP/s on RTX A2000 and A4000, 0.077 on A40, 0.080 the best of A6000 "
    f"({TORCH_PRODUCTS})",
)
ADA = replace(
    OLDER,
    curve=_products(0.98),
    curve_source=f"{_HEIGHT}: 152 to 168, in the mean 159, of 165 TFLOP/s on RTX 4090; 107 to 114 of 119.5 on L20, 45 "
    f"to 48 of 44 on RTX 4060 Ti ({TORCH_PRODUCTS})",
    attention=_attention(AttentionShare(forward=0.98, backward=0.70, block=128)),
    attention_source="the second version on RTX 4090, 2,048 tokens, 128 features a head: 169 of 165.2 TFLOP/s forward "
    "and 125 backward, 151 and 99 causal (apache/tvm, tl_doc/flash_perf.md); taken to be no faster than products; "
    f"{_FIRST}",
    attention_products=0.98,
    flops_per_watt=0.80e12,
    power_source="TFLOP/s of bf16 a watt where the power limit holds products back, after what few tiles cost: 0.81 on "
    "L4 (72 W; 53 to 59 TFLOP/s), 0.80 on L40S (350 W; 269 the best); tf32 reaches the same share of its peak "
    f"({TORCH_PRODUCTS})",
    vector_fraction=0.65,
    vector_flops_per_watt=0.15e12,
    vector_source="51 to 53 of 82.6 TFLOP/s on RTX 4090, 35 to 36 of 59.8 on L20; a watt 0.15 to 0.17 TFLOP/s on L4, "
    f"0.13 the best of L40S ({TORCH_PRODUCTS})",
)
RTX_BLACKWELL = replace(
    OLDER,
    curve=_products(1.0),
    curve_source=f"{_HEIGHT}: 181 to 240 of 209.5 TFLOP/s on three RTX 5090, 134 to 179 on a fourth, 89 to 103 of 113 "
    f"on RTX 5080, 62 to 66 of 61.7 on RTX 5070, whose clocks are above the data sheet's ({TORCH_PRODUCTS}); taken to "
    "be the peak",
    attention=_attention(AttentionShare(forward=0.90, backward=0.64, block=128)),
    attention_source="the second version on RTX 5090 held to 400 W: 185 to 191 of 209.5 TFLOP/s forward, 8 heads of "
    f"4,096 queries and 8,192 keys (gau-nernst/learn-cuda, 07_attention); backward in proportion to RTX 4090, {_FIRST}",
    vector_fraction=0.66,
    vector_source=f"64 to 67 of 104.8 TFLOP/s on three RTX 5090 ({TORCH_PRODUCTS})",
)
PASCAL = replace(
    OLDER,
    tiles=None,
    tiles_source="",
    vector_fraction=0.92,
    vector_source=f"9.5 of 10.6 TFLOP/s on P100 SXM2, 8.6 of 9.3 on P100 PCIe ({TORCH_PRODUCTS})",
)
MAXWELL = PASCAL
