"""Whole runs: Daly's intervals, published runs as anchors, and money and energy that add up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.catalog.devices import devices
from meshwright.catalog.prices import PRICES, priced
from meshwright.cost import PlanTable, predict
from meshwright.cost.goodput import POWER_USAGE_EFFECTIVENESS, _copy_seconds, agreed_seconds, outlook, rates, save
from meshwright.spec.cluster import Link
from meshwright.spec.job import CheckpointSpec
from meshwright.spec.outlook import Outlook
from tests.cost.cost_examples import A100, JOB, design, llama, selene


@pytest.mark.parametrize(("hours", "minutes"), [(24.0, 117.0), (6.0, 57.0), (0.25, 9.1)])
def test_dalys_own_optima(hours, minutes):
    """Figures 3 to 5 of doi 10.1016/j.future.2004.11.016: dumps of 5 min, restarts of 10 min."""
    found = save(
        step_seconds=0.1,
        stall_seconds=300.0,
        write_seconds=300.0,
        restart_seconds=600.0,
        seconds_between_failures=3600.0 * hours,
    )
    assert found.every_seconds / 60.0 == pytest.approx(minutes, rel=0.01)


@given(
    st.floats(1.0, 300.0),
    st.floats(1.0, 600.0),
    st.floats(600.0, 1e6),
    st.floats(0.5, 30.0),
)
def test_no_other_interval_does_better(stall, restart, between, step):
    def at(steps: int) -> float:
        return save(
            step_seconds=step,
            stall_seconds=stall,
            write_seconds=stall,
            restart_seconds=restart,
            seconds_between_failures=between,
            every_steps=steps,
        ).goodput

    best = save(
        step_seconds=step,
        stall_seconds=stall,
        write_seconds=stall,
        restart_seconds=restart,
        seconds_between_failures=between,
    )
    assert 0.0 < best.goodput < 1.0
    steps = round(best.every_seconds / step)
    if best.every_seconds > stall + step:
        for other in (max(1, steps // 3), 3 * steps):
            assert at(other) <= best.goodput * 1.002


def test_the_model_is_what_a_simulation_of_failures_gives():
    between, stall, restart, every = 3600.0, 60.0, 300.0, 600.0
    expected = save(
        step_seconds=every,
        stall_seconds=stall,
        write_seconds=stall,
        restart_seconds=restart,
        seconds_between_failures=between,
        every_steps=1,
    ).goodput
    random = np.random.default_rng(7)
    clock, done, fails = 0.0, 0, random.exponential(between)
    while done < 20_000:
        if clock + every + stall <= fails:
            clock, done = clock + every + stall, done + 1
            continue
        clock = fails
        fails = clock + random.exponential(between)
        while clock + restart > fails:
            clock = fails
            fails = clock + random.exponential(between)
        clock += restart
    assert done * every / clock == pytest.approx(expected, rel=0.03)


def llama_405b(devices_count: int, *, storage: float | None = None) -> Outlook:
    model = catalog.load_model("llama-3.1-405b")
    table = PlanTable.build(
        {"tensor": 8, "pipeline": 16, "shard": devices_count // 128},
        layouts=(),
    )
    job = replace(JOB, sequence_length=8192, batch_tokens=16 * 2**20, total_tokens=int(15.6e12))
    cluster = replace(catalog.load_cluster(f"{devices_count}xH100"), storage_bandwidth=storage)
    seconds = model.flops_per_token(8192) * job.batch_tokens / (devices_count * 380e12)
    return outlook(table, step_seconds=seconds, model=model, cluster=cluster, job=job)


def test_llama_3_405b_fails_as_often_and_loses_as_little_as_was_published():
    """2407.21783: 419 unexpected interruptions in 54 days on 16,384 H100 at 380 TFLOP/s, over 90 % effective."""
    found = llama_405b(16384)
    assert found.goodput is not None
    assert found.failures is not None
    assert 0.90 < found.goodput < 0.99
    assert found.failures / found.days == pytest.approx(419 / 54, rel=0.02)
    assert found.hours_between_failures == pytest.approx(54 * 24 / 419)
    assert 40 < found.days < 80


def test_the_interval_of_many_devices_is_youngs_of_the_copy_to_the_host_and_of_the_word_of_all_ranks():
    """A device of 16,384 holds 297 MB of the 12 bytes a parameter: 5.9 ms over the 50 GB/s that its link sustains. All
    ranks tell one another in two turns around a ring: 2402.15627 tells several seconds on 12,288."""
    found = llama_405b(16384)
    model, group = catalog.load_model("llama-3.1-405b"), catalog.load_cluster("16384xH100").groups[0]
    share = 12.0 * model.parameters / 16384
    rate = group.host.bandwidth * group.host.efficiency
    copied = group.host.latency_seconds + share / rate
    assert found.stall_seconds == pytest.approx(copied + 2 * 16383 * 30e-6)
    assert 0.5 < found.stall_seconds < 5.0
    young = (2.0 * found.stall_seconds * found.hours_between_failures * 3600.0) ** 0.5
    step = model.flops_per_token(8192) * 16 * 2**20 / (16384 * 380e12)
    assert abs(found.checkpoint_seconds - young) < step
    assert found.checkpoint_seconds > found.write_seconds
    assert not found.checkpoint_hurries


def test_a_checkpoint_begins_when_the_last_is_written_by_the_storage_that_the_cluster_names():
    """5 GB/s take 4.87 TB in 16 minutes, six times the interval that wastes least."""
    slow, assumed = llama_405b(16384, storage=5e9), llama_405b(16384)
    assert slow.write_seconds == pytest.approx(slow.checkpoint_bytes / 5e9 + agreed_seconds(16384))
    assert slow.checkpoint_seconds >= slow.write_seconds > 4 * assumed.checkpoint_seconds
    assert slow.goodput < assumed.goodput
    assert "storage takes 5 GB/s, as the cluster says" in slow.assumed[0]
    assert "storage takes 122 MB/s a device, as the cluster names none" in assumed.assumed[0]
    assert assumed.checkpoint_bytes / assumed.checkpoint_seconds < 0.05 * 2e12


def test_what_is_copied_to_hosts_more_slowly_than_storage_takes_it_is_safe_when_it_is_copied():
    swift = llama_405b(1024, storage=1e15)
    assert swift.stall_seconds == swift.write_seconds


def test_devices_of_a_node_share_the_memory_of_its_host():
    group = replace(selene(nodes=1).groups[0], host=Link(bandwidth=1e11, latency_seconds=0.0, efficiency=1.0))
    assert _copy_seconds(1e9, replace(group, host_bandwidth=None)) == pytest.approx(1e-2)
    assert _copy_seconds(1e9, replace(group, host_bandwidth=8e10)) == pytest.approx(1e9 * group.devices_per_node / 8e10)


def test_a_checkpoint_before_the_last_is_written_waits_for_it():
    asked = {
        "step_seconds": 1.0,
        "stall_seconds": 0.1,
        "write_seconds": 10.0,
        "restart_seconds": 600.0,
        "seconds_between_failures": 1e9,
    }
    hurried, patient = save(**asked, every_steps=1), save(**asked, every_steps=20)
    assert hurried.goodput == pytest.approx(1.0 / 10.0, rel=1e-3)
    assert patient.goodput == pytest.approx(20.0 / 20.1, rel=1e-3)
    assert save(**asked).every_seconds >= 10.0


def test_an_interval_that_is_too_short_is_said():
    model = llama(width=4096, hidden=16384, heads=32, layers=2)
    made = design(model, catalog.load_cluster("16xH100"), shard=16)
    often = replace(made, job=replace(made.job, checkpoint=replace(made.job.checkpoint, every_steps=1)))
    whole = predict(often).outlook
    assert whole.checkpoint_seconds < whole.write_seconds
    assert whole.checkpoint_hurries
    assert not predict(made).outlook.checkpoint_hurries


def test_a_small_cluster_hardly_fails():
    few, many = llama_405b(1024), llama_405b(16384)
    assert few.goodput is not None
    assert many.goodput is not None
    assert few.goodput > many.goodput
    assert few.goodput > 0.98
    stored = [found.write_seconds - agreed_seconds(count) for found, count in ((few, 1024), (many, 16384))]
    assert stored[0] == pytest.approx(16 * stored[1])


def test_energy_of_bloom():
    """2211.02001, table 3: 1,082,990 hours of A100 at 400 W are 433,196 kWh, before what the building adds."""
    found = rates(np.array([384]), catalog.load_cluster("384xA100-80GB"))
    hours = 1_082_990 / 384
    assert float(found.watts[0]) / 1000.0 * hours == pytest.approx(433_196, rel=1e-4)


def test_money_and_energy_of_a_run_add_up():
    device = replace(A100, watts=400.0, hours_between_failures=10_000.0)
    case = design(llama(), selene(nodes=2, device=device), replicate=16)
    report = predict(case)
    whole = report.outlook
    assert whole is not None
    assert whole.goodput is not None
    hours = report.total_seconds / 3600.0 / whole.goodput
    assert whole.seconds == pytest.approx(3600.0 * hours)
    assert whole.dollars == pytest.approx(hours * 16 * 2.0) == pytest.approx(report.total_cost)
    assert whole.kilowatt_hours == pytest.approx(hours * 16 * 0.4 * POWER_USAGE_EFFECTIVENESS)
    assert whole.dollars_per_billion == pytest.approx(1e9 * whole.dollars / whole.tokens)
    assert whole.failures == pytest.approx(hours * 16 / 10_000.0)
    assert math.isclose(whole.checkpoint_bytes, 12.0 * case.model.parameters)


def test_what_is_not_known_is_none():
    report = predict(design(llama(), selene(nodes=1, device=replace(A100, price_per_hour=None))))
    whole = report.outlook
    assert whole is not None
    for value in (whole.goodput, whole.dollars, whole.kilowatt_hours, whole.failures, whole.dollars_per_billion):
        assert value is None
    assert whole.seconds == pytest.approx(report.total_seconds)
    assert "no failure rate" in whole.assumed[0]


def test_a_job_that_says_when_it_saves_is_believed():
    device = replace(A100, hours_between_failures=10_000.0)
    job = replace(JOB, checkpoint=CheckpointSpec(every_steps=7))
    report = predict(design(llama(), selene(nodes=1, device=device), job=job))
    assert report.outlook is not None
    assert report.outlook.checkpoint_seconds == pytest.approx(7 * report.step_seconds)
    waits = predict(design(llama(), selene(nodes=1, device=device), job=replace(job, checkpoint=_waiting())))
    assert waits.outlook is not None
    assert waits.outlook.stall_seconds == waits.outlook.write_seconds > report.outlook.stall_seconds


def _waiting() -> CheckpointSpec:
    return CheckpointSpec(every_steps=7, asynchronous=False)


def test_rates_are_of_the_devices_in_use():
    cheap = replace(A100, price_per_hour=1.0, watts=100.0)
    unknown = replace(A100, name="other", price_per_hour=None, watts=300.0)
    first, second = selene(nodes=1, device=cheap), selene(nodes=1, device=unknown)
    both = replace(first, groups=(*first.groups, *second.groups))
    found = rates(np.array([4, 8, 10]), both)
    assert found.dollars_per_hour[:2].tolist() == [4.0, 8.0]
    assert np.isnan(found.dollars_per_hour[2])
    assert found.watts.tolist() == [400.0, 800.0, 1400.0]


@pytest.mark.parametrize("name", PRICES)
def test_a_price_is_of_a_known_device_and_has_a_source(name):
    device = devices()[name]
    assert device.price_per_hour == PRICES[name][0] > 0.0
    assert device.sources["price_per_hour"]
    assert priced(replace(device, price_per_hour=1.0)).price_per_hour == 1.0
