"""Ranks that wait for each other go as the slowest of them."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright import cost
from meshwright.catalog.devices import devices
from meshwright.cost.slowest import slowest_share
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.job import JobSpec
from meshwright.spec.report import LineName
from tests.cost.cost_examples import A100, design, llama, selene

DRAWN = np.random.default_rng(7).standard_normal((20_000, 512))


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_slowest_of_drawn_devices_is_as_slow_as_told(count):
    drawn = np.mean(1.0 + 0.015 * DRAWN[:, :count].max(axis=1))
    assert 1.0 / slowest_share(np.array([float(count)]), spread=0.015) == pytest.approx([drawn], abs=0.0005)


def test_one_device_waits_for_none_and_more_for_a_slower_one():
    share = slowest_share(np.array([1.0, 8.0, 64.0, 4096.0]), spread=0.015)
    assert share[0] == 1.0
    assert np.all(np.diff(share) < 0.0)
    assert np.all(slowest_share(np.array([1.0, 4096.0]), spread=0.0) == 1.0)


def test_only_devices_of_fixed_clocks_are_alike():
    assert {device.kind for device in devices().values() if device.spread == 0.0} == {DeviceKind.TPU}
    assert all("spread" in device.sources for device in devices().values() if device.spread)


def test_work_is_slower_by_it_and_what_memory_bounds_is_not():
    """Ranks of a stage wait for each other; those of another stage have waits of their own."""
    alike, apart = (predicted_seconds(spread) for spread in (0.0, 0.02))
    assert apart[LineName.FORWARD] / alike[LineName.FORWARD] == pytest.approx(1.0 / SHARE, rel=0.01)
    assert apart[LineName.OPTIMIZER] == alike[LineName.OPTIMIZER]


SHARE = slowest_share(np.array([4.0]), spread=0.02)[0]


def predicted_seconds(spread):
    """Of eight ranks in two stages, whose work is in large products."""
    job = JobSpec(sequence_length=2048, batch_tokens=2048 * 64, total_tokens=2048 * 640)
    on = selene(nodes=1, device=replace(A100, spread=spread))
    step = cost.predict(
        design(llama(width=8192, hidden=32768, heads=64), on, job=job, pipeline=2, replicate=4, microbatch=4)
    ).step
    return {name: step.find(name).seconds for name in (LineName.FORWARD, LineName.OPTIMIZER)}
