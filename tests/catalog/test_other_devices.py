"""Devices of other makers than NVIDIA: what was measured of them, and the way to their hosts' memory."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.catalog.devices import devices
from meshwright.catalog.nodes import nodes
from meshwright.cost.products import product_seconds
from meshwright.cost.rates import rates
from meshwright.cost.stacks import software
from meshwright.cost.table import PRECISIONS
from meshwright.spec.cluster import AttentionKernel, Precision

BEST = 782 / 620  # the best product of MI300X over those of a model one after the other


@pytest.mark.parametrize("name", ["MI250X-GCD", "MI300X", "MI325X", "MI355X"])
def test_attention_of_amds_devices_is_no_faster_than_their_best_product(name: str) -> None:
    device = devices()[name]
    products = device.matrix[Precision.BF16].fraction
    assert device.attention_kernels
    for share in device.attention_kernels.values():
        assert share.backward < share.forward < BEST * products


def test_attention_of_mi300x_is_in_proportion_to_what_was_measured_of_it() -> None:
    """328.6 TFLOP/s with heads of 64 features (Azure's AI benchmarking guide), which 4,096 tokens are told to reach."""
    device = devices()["MI300X"]
    share = device.attention_kernels[AttentionKernel.FLASH_2]
    wide, narrow = 128 / (128 + share.half_dim), 64 / (64 + share.half_dim)
    reached = share.forward * device.peak_flops[Precision.BF16] / (1.0 + share.block / 4096) * narrow / wide
    assert reached == pytest.approx(328.6e12, rel=0.1)


@pytest.mark.parametrize(
    ("kernel", "forward", "backward", "off"),
    [
        (AttentionKernel.NATIVE, (1069e12, 1173e12, 1247e12), (877e12, 1034e12, 1109e12), 0.04),
        (AttentionKernel.FLASH_2, (755e12, 844e12, 903e12), (456e12, 480e12, 540e12), 0.08),
        (AttentionKernel.TRITON, (422e12, 630e12, 762e12), (143e12, 224e12, 259e12), 0.19),
    ],
)
def test_kernels_of_mi355x_reach_what_was_measured_of_them(
    kernel: AttentionKernel, forward: tuple[float, ...], backward: tuple[float, ...], off: float
) -> None:
    """16 sequences of 4,096, 8,192 and 16,384 tokens, 16 heads of 128, causal (HazyResearch/HipKittens, analysis)."""
    device = devices()["MI355X"]
    share, peak = device.attention_kernels[kernel], device.peak_flops[Precision.BF16]
    for length, ahead, back in zip((4096, 8192, 16384), forward, backward, strict=True):
        whole, blocks = 1.0 + share.block / length, 16 * 16 * length / share.block
        assert share.forward * peak / whole / (1.0 + share.forward_half / blocks) == pytest.approx(ahead, rel=off)
        assert share.backward * peak / whole / (1.0 + share.backward_half / blocks) == pytest.approx(back, rel=off)


@pytest.mark.parametrize(("precision", "reached"), [(Precision.BF16, 616e12), (Precision.FP8, 1143e12)])
def test_mi325x_multiplies_the_typical_products_as_was_measured(precision: Precision, reached: float) -> None:
    """Ten products of DeepSeek-V3, all their FLOPs over all their seconds (AMD's Typical Attained FLOPs)."""
    wide = ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 256))
    shapes = [(tokens, n, k) for tokens in (32, 32768) for n, k in wide]
    m, n, k = (np.array(side, dtype=np.float64) for side in zip(*shapes, strict=True))
    row = np.array([PRECISIONS.index(precision)])
    found = rates(devices()["MI325X"], precision=row, length=4096, software=software("primus"))
    seconds = product_seconds(m, n, k, found.products)
    assert float((2.0 * m * n * k).sum() / seconds.sum()) == pytest.approx(reached, rel=0.01)


def test_pytorch_has_another_kernel_of_attention_on_amds_devices() -> None:
    rows = np.array([PRECISIONS.index(Precision.BF16)])
    flops = {
        (device, name): float(
            rates(devices()[device], precision=rows, length=8192, software=software(name)).attention.backward[0]
        )
        for device in ("MI300X", "H100")
        for name in ("primus", "torch-2025", "torch-2025-flash-2", "torch-2025-native")
    }
    assert flops["MI300X", "torch-2025"] < 0.6 * flops["MI300X", "torch-2025-flash-2"]
    assert flops["MI300X", "torch-2025-flash-2"] < flops["MI300X", "primus"] == flops["MI300X", "torch-2025-native"]
    assert flops["H100", "torch-2025"] == flops["H100", "primus"]


@pytest.mark.parametrize(("name", "rate"), [("TPU-v4", 16e9), ("TPU-v5e", 15e9), ("TPU-v5p", 15e9), ("TPU-v6e", 32e9)])
def test_tpus_reach_the_memory_of_their_hosts(name: str, rate: float) -> None:
    """Bytes/s of a chip each way as "How to Scale Your Model" has them."""
    host = nodes()[name].host
    assert host is not None
    assert host.link.bandwidth * host.link.efficiency == rate
    assert {"bandwidth", "host_bytes", "host_bandwidth"} <= set(host.link.sources)


def test_a_compiled_program_uses_all_but_the_runtimes_memory() -> None:
    """A TPU has no allocator whose fragments are lost, and no context of CUDA."""
    tpu, gpu = devices()["TPU-v5e"], devices()["A100-40GB"]
    assert (tpu.usable_fraction, tpu.reserved_bytes / 2**30) == (1.0, 0.25)
    assert gpu.usable_fraction < 1.0
    assert gpu.reserved_bytes > tpu.reserved_bytes
