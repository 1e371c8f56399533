"""Devices of other makers than NVIDIA: what was measured of them, and the way to their hosts' memory."""

from __future__ import annotations

import pytest

from meshwright.catalog.devices import devices
from meshwright.catalog.nodes import nodes
from meshwright.spec.cluster import Precision


@pytest.mark.parametrize("name", ["MI250X-GCD", "MI300X", "MI355X"])
def test_attention_of_amds_devices_is_no_faster_than_their_products(name: str) -> None:
    device = devices()[name]
    products = device.matrix[Precision.BF16].fraction
    assert device.attention_kernels
    for share in device.attention_kernels.values():
        assert share.backward < share.forward < products


def test_attention_of_mi300x_is_what_was_measured() -> None:
    """328.6 TFLOP/s with heads of 64 features (Azure's AI benchmarking guide), a fifth more with 128."""
    device = devices()["MI300X"]
    (share,) = set(device.attention_kernels.values())
    assert share.forward * device.peak_flops[Precision.BF16] == pytest.approx(1.2 * 328.6e12, rel=1e-3)


def test_more_watts_add_nothing_to_mi325x() -> None:
    """Its best product is that of MI300X (MAMF: 784.9 and 781.9 TFLOP/s), and so is what lasts."""
    known = devices()
    assert known["MI325X"].matrix[Precision.BF16] == known["MI300X"].matrix[Precision.BF16]
    assert known["MI325X"].peak_flops[Precision.BF16] * known["MI325X"].matrix[Precision.BF16].fraction < 784.9e12


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
