"""What devices reach under their power limits, precision by precision, beside what was measured of them."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.catalog.devices import devices
from meshwright.cost.products import product_seconds
from meshwright.cost.rates import rates
from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS
from meshwright.spec.cluster import AttentionKernel, DeviceKind, Precision

SIZES = (4096.0, 8192.0, 10240.0)


def figures(name: str, precision: Precision):
    """What the cost model has of one precision of a device."""
    return rates(devices()[name], precision=np.array([PRECISIONS.index(precision)]), length=2048, software=Software())


def measured(name: str, precision: Precision) -> float:
    """TFLOP/s of square products of SIZES, as torch-performance-test-data takes them, in the mean."""
    found = figures(name, precision).products
    seconds = [float(product_seconds(*(np.array([size]),) * 3, found)[0]) for size in SIZES]
    return sum(2e-12 * size**3 / took for size, took in zip(SIZES, seconds, strict=True)) / len(SIZES)


@pytest.mark.parametrize(
    ("name", "reached"),
    [("L4", 55.1), ("A10G", 66.1), ("A40", 114.9), ("RTX-4090", 158.5), ("RTX-2080Ti", 51.9), ("V100-16GB", 94.2)],
)
def test_products_in_half_precision_are_what_torch_measured(name: str, reached: float) -> None:
    """Means of fp16 and bf16, where there is bf16 (issues 120, 126, 185, 78, 115 and 181, 140)."""
    assert measured(name, Precision.FP16) == pytest.approx(reached, rel=0.03)


@pytest.mark.parametrize(
    ("name", "reached"),
    [("L4", 11.4), ("A10G", 23.0), ("A40", 23.2), ("RTX-4090", 52.6), ("V100-16GB", 14.2), ("T4", 4.3)],
)
def test_fp32_is_held_back_by_its_own_watts(name: str, reached: float) -> None:
    """The same issues; T4 by the best of three. Half precision's watts a FLOP would leave a third of some of these."""
    assert measured(name, Precision.FP32) == pytest.approx(reached, rel=0.08)


@pytest.mark.parametrize(
    ("name", "reached"), [("L4", 25.3), ("A40", 57.9), ("RTX-4090", 84.9), ("A100-40GB-PCIe", 102)]
)
def test_tf32_loses_as_much_of_its_peak_as_half_precision(name: str, reached: float) -> None:
    assert measured(name, Precision.TF32) == pytest.approx(reached, rel=0.1)


def test_boards_of_one_generation_sustain_as_much_a_watt() -> None:
    """A10 and A6000 are held to 150 and 300 W; A10G, of 300 W, reaches its peak before them."""
    known = devices()

    def sustained(name: str) -> float:
        return known[name].peak_flops[Precision.BF16] * known[name].matrix[Precision.BF16].fraction

    assert sustained("A10") / 150 == pytest.approx(sustained("A6000") / 300)
    assert sustained("L4") / 72 == pytest.approx(sustained("RTX-6000-Ada") / 300)
    assert sustained("A10G") / 300 < 0.6 * sustained("A10") / 150
    assert "FLOP/s a watt" in known["A10"].sources["matrix"]
    assert "FLOP/s a watt" not in known["A10G"].sources["matrix"]


@pytest.mark.parametrize(
    ("held", "free"),
    [("H100-PCIe", "H100"), ("H100-NVL", "H100"), ("H100-96GB", "H100"), ("B100", "B200"), ("L40S", "RTX-4090")],
)
def test_attention_loses_what_the_power_limit_takes_of_products(held: str, free: str) -> None:
    known = devices()
    products = known[held].matrix[Precision.BF16].fraction / known[free].matrix[Precision.BF16].fraction
    assert products < 1.0
    for kernel in known[free].attention_kernels:
        less, share = known[held].attention_kernels[kernel], known[free].attention_kernels[kernel]
        assert less.forward == pytest.approx(share.forward * products)
        assert less.backward == pytest.approx(share.backward * products)


def test_attention_keeps_its_share_where_it_was_measured() -> None:
    """H100 SXM, A100 of 300 and 400 W, B200 and B300 (fits of their own attention)."""
    fitted = ("H100", "A100-80GB", "A100-80GB-PCIe", "B200", "B300")
    native = {name: devices()[name].attention_kernels[AttentionKernel.NATIVE] for name in fitted}
    assert (native["H100"].forward, native["H100"].backward, native["H100"].forward_half) == (0.69, 0.54, 235)
    assert native["A100-80GB"] == native["A100-80GB-PCIe"]
    assert native["A100-80GB"].forward == 0.69
    assert (native["B200"].forward, native["B300"].forward) == (0.55, 0.55 * 1.25)


def test_no_attention_is_faster_than_products_but_where_it_was_measured() -> None:
    """Blackwell is within a twentieth, AITER on AMD's devices a twelfth, B300 with twice the exponentials a fifth."""
    for name, device in devices().items():
        half = Precision.FP16 if Precision.FP16 in device.peak_flops else Precision.BF16
        plain = 1.08 if device.kind is DeviceKind.ROCM else 1.05
        most = {"B300": 1.2}.get(name, plain) * device.matrix[half].fraction
        for share in device.attention_kernels.values():
            assert max(share.forward, share.backward) < most, name


def test_attention_of_h20_is_what_was_measured() -> None:
    """127.6 TFLOP/s of whole scores, two sequences of 2,048 tokens and 16 heads (flash-attention, issue 1310)."""
    found = figures("H20", Precision.BF16).attention
    blocks = 2 * 16 * 2048 / 128
    assert float(found.forward[0]) / (1.0 + found.forward_half / blocks) == pytest.approx(127.6e12, rel=0.03)


def test_fewer_multiprocessors_are_full_with_fewer_blocks() -> None:
    known = devices()
    whole, cut = (known[name].attention_kernels[AttentionKernel.NATIVE] for name in ("H100", "H100-PCIe"))
    assert cut.forward_half / whole.forward_half == pytest.approx(114 / 132)


def test_attention_in_fp32_is_no_faster_than_products_in_fp32() -> None:
    device = devices()["RTX-4090"]
    found = figures("RTX-4090", Precision.FP32).attention
    assert float(found.forward[0]) == device.peak_flops[Precision.FP32] * device.matrix[Precision.FP32].fraction


@pytest.mark.parametrize("name", ["V100-32GB", "T4", "Titan-RTX"])
def test_boards_without_flash_attention_have_the_memory_efficient_kernel(name: str) -> None:
    (share,) = set(devices()[name].attention_kernels.values())
    assert share.backward < share.forward < 0.31
