"""What the planner says of a precision that the devices have no arithmetic for."""

from dataclasses import replace

import pytest

from meshwright.search import design
from meshwright.spec.cluster import Precision
from tests.search import search_samples as samples


def emulating(*, rate):
    """Two slow devices with `rate` of their fp32 in bf16."""
    device = samples.device(speed=1e-3)
    peaks = device.peak_flops | {Precision.BF16: rate * device.peak_flops[Precision.FP32]}
    return samples.cluster(samples.nodes(devices_per_node=2, of=replace(device, peak_flops=peaks)))


@pytest.mark.parametrize(("rate", "spoken"), [(0.1, True), (2.0, False)])
def test_bf16_that_is_emulated_is_spoken_of(rate, spoken):
    job = replace(samples.job(), precision=Precision.BF16)
    found = design(samples.model(), emulating(rate=rate), job, top=1)
    assert any("in fp32 this plan would take" in line for line in found.why) == spoken
    free = design(samples.model(), emulating(rate=rate), replace(job, other_precisions=(Precision.FP32,)), top=1)
    (precision,) = {group.precision for stage in free.design.plan.stages for group in stage.groups}
    assert (precision is Precision.FP32) == spoken
    assert not any("in fp32 this plan would take" in line for line in free.why)
