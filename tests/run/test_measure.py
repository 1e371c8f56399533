"""Times become figures: the fits find what made the times, and a short real measurement fills a cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from meshwright import catalog
from meshwright.run.detect import calibration_file, detect
from meshwright.run.figures import Measured, with_measurements
from meshwright.run.fit import fit_collective, fit_matrix_curve
from meshwright.run.in_step import as_in_a_step
from meshwright.run.machine import this_machine
from meshwright.run.measure import measure, save_cluster
from meshwright.run.measure_device import MATRIX_SHAPES, AttentionTime, DeviceTimes, MatrixTime
from meshwright.run.measure_layers import LayerTimes, measure_scaling, time_layers
from meshwright.run.measure_network import MESSAGE_BYTES, CollectiveTime, NetworkTimes
from meshwright.spec.cluster import AttentionRate, Collective, MatrixCurve, Precision
from meshwright.spec.errors import EnvironmentUnfit

PEAK, LAUNCH = 1e11, 5e-6
CURVE = MatrixCurve(fraction=0.8, half_m=12.0, half_n=20.0, half_k=60.0)


def matrix_seconds(time: MatrixTime, curve: MatrixCurve, *, peak: float, launch: float) -> float:
    """MatrixCurve's formula."""
    rate = peak * curve.fraction
    for size, half in ((time.m, curve.half_m), (time.n, curve.half_n), (time.k, curve.half_k)):
        rate *= size / (size + half)
    return 2.0 * time.m * time.n * time.k / rate + launch


def made_by(curve: MatrixCurve) -> list[MatrixTime]:
    blank = [MatrixTime(precision=Precision.FP32, m=m, k=k, n=n, seconds=1.0) for m, k, n in MATRIX_SHAPES]
    seconds = [matrix_seconds(time, curve, peak=PEAK, launch=LAUNCH) for time in blank]
    return [
        MatrixTime(precision=time.precision, m=time.m, k=time.k, n=time.n, seconds=value)
        for time, value in zip(blank, seconds, strict=True)
    ]


def test_a_matrix_curve_is_found_again_from_its_times() -> None:
    times = made_by(CURVE)
    found = fit_matrix_curve(times, peak=PEAK, launch=LAUNCH)
    apart = [abs(math.log(matrix_seconds(time, found, peak=PEAK, launch=LAUNCH) / time.seconds)) for time in times]
    assert sum(apart) / len(apart) < 0.02
    unseen = MatrixTime(precision=Precision.FP32, m=300, k=700, n=900, seconds=1.0)
    expected = matrix_seconds(unseen, CURVE, peak=PEAK, launch=LAUNCH)
    assert matrix_seconds(unseen, found, peak=PEAK, launch=LAUNCH) == pytest.approx(expected, rel=0.05)


def test_latency_and_bandwidth_are_found_again_from_their_times() -> None:
    times = [
        CollectiveTime(operation=Collective.ALL_GATHER, ranks=4, num_bytes=size, seconds=2e-3 + size / 8e8)
        for size in MESSAGE_BYTES
    ]
    found = fit_collective(times)
    assert (found.operation, found.ranks) == (Collective.ALL_GATHER, 4)
    assert found.latency_seconds == pytest.approx(2e-3, rel=0.02)
    assert found.bytes_per_second == pytest.approx(8e8, rel=0.02)


def attention_at(rate: float, *, half_dim: float) -> tuple[AttentionTime, ...]:
    """Times of heads that reach dim / (dim + half_dim) of `rate`, forward and backward."""
    return tuple(
        AttentionTime(
            precision=Precision.FP32,
            length=256,
            head_dim=dim,
            flops=1e6 * dim,
            forward_seconds=1e6 * (dim + half_dim) / rate,
            backward_seconds=2.5e6 * (dim + half_dim) / rate,
        )
        for dim in (32, 64)
    )


def measurements(*, together: tuple[tuple[int, float], ...]) -> Measured:
    matrices = tuple(made_by(CURVE))
    one = DeviceTimes(
        threads=1,
        matrices=matrices,
        attention=attention_at(4e10, half_dim=8.0),
        layers=(layer_times(seconds=1.0),),
        copy_bytes_per_second=2e10,
        optimizer_bytes_per_second=3e10,
        launch_seconds=4e-6,
        layer_forward_seconds=1.8e-4,
        layer_backward_seconds=2.9e-4,
        step_overhead_seconds=5e-4,
    )
    times = tuple(
        CollectiveTime(operation=operation, ranks=2, num_bytes=size, seconds=1e-3 + size / 1e9)
        for operation in Collective
        for size in MESSAGE_BYTES
    )
    network = NetworkTimes(backend="gloo", collectives=times, together=together, resident_bytes=2**28)
    return Measured(one=one, gain=2.0, cores=2, network=network)


def test_every_measured_figure_has_its_place_and_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(import_module("meshwright.run.detect"), "accelerator_names", lambda: ())
    measured = measurements(together=((1, 1.0), (2, 1.8), (4, 1.7)))
    cluster = with_measurements(detect(), measured, stamp="measured in a test")
    group = cluster.groups[0]
    device = group.device
    peak = device.peak_flops[Precision.FP32]
    assert group.together == pytest.approx((1.0, 1.8, 1.8, 1.8))
    assert device.scaling == pytest.approx((1.0, 2.0))
    assert device.memory_bandwidth == 2e10
    (rate,) = device.attention_rates
    assert (rate.length, rate.half_dim) == (256, pytest.approx(8.0))
    assert rate.forward_flops == pytest.approx(rate.backward_flops)
    assert device.matrix[Precision.FP32].half_k < peak
    assert device.optimizer_bandwidth == 3e10
    assert device.reserved_bytes == 2**28
    assert {fit.operation for fit in group.inside.fits} == set(Collective)
    assert all(device.sources[name] == "measured in a test" for name in ("peak_flops", "matrix", "scaling"))
    host = [26 * device.launch_seconds + device.layer_seconds, 52 * device.launch_seconds + device.layer_seconds]
    assert host == pytest.approx([1.8e-4, 2.9e-4], rel=0.1)


def layer_times(*, seconds: float) -> LayerTimes:
    return LayerTimes(
        precision=Precision.FP32,
        product_seconds=0.5 * seconds,
        scores_seconds=0.3 * seconds,
        element_seconds=0.2 * seconds,
    )


def test_levels_are_those_of_a_step_and_shapes_those_of_the_probes() -> None:
    device = catalog.local_cluster(cores=2, memory_bytes=16e9, devices=4).groups[0].device
    device = replace(
        device,
        attention_rates=(
            AttentionRate(precision=Precision.FP32, length=256, forward_flops=3e10, backward_flops=4e10, half_dim=8.0),
        ),
    )
    slow, fast = (as_in_a_step(device, [layer_times(seconds=seconds)]) for seconds in (2.0, 1.0))
    curves = [entry.matrix[Precision.FP32] for entry in (slow, fast)]
    assert curves[1].fraction == pytest.approx(2.0 * curves[0].fraction)
    assert curves[1].half_k == curves[0].half_k == device.matrix[Precision.FP32].half_k
    rates = [entry.attention_rates[0] for entry in (slow, fast)]
    assert rates[1].forward_flops == pytest.approx(2.0 * rates[0].forward_flops)
    assert rates[1].backward_flops / rates[1].forward_flops == pytest.approx(4.0 / 3.0)
    bandwidths = [entry.memory_bandwidth * entry.memory_fraction for entry in (slow, fast)]
    assert bandwidths[1] == pytest.approx(2.0 * bandwidths[0])
    assert as_in_a_step(device, []) == device


def test_the_operators_of_a_decoder_are_timed_by_kind() -> None:
    found = time_layers(Precision.FP32, seconds=0.0)
    assert min(found.product_seconds, found.scores_seconds, found.element_seconds) > 0.0


@pytest.mark.slow
def test_passes_are_timed_with_each_number_of_threads_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    found = measure_scaling(precision=Precision.FP32, threads=(1, 2), seconds=0.0)
    assert len(found) == 2
    assert min(found) > 0.0
    assert used == [1, 2] * (len(used) // 2)


@pytest.mark.slow
def test_a_short_real_measurement_fills_and_keeps_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    said: list[str] = []
    cluster = measure(seconds_budget=6.0, progress=said.append)
    group = cluster.groups[0]
    assert len(said) >= 2
    assert "measured on" in cluster.source
    assert this_machine().torch_version in cluster.source
    assert all(math.isfinite(rate) and rate > 1e8 for rate in group.device.peak_flops.values())
    assert {fit.ranks for fit in group.inside.fits} >= {2, 4}
    assert all(fit.bytes_per_second > 1e6 for fit in group.inside.fits)
    assert calibration_file().is_file()
    assert detect().groups == cluster.groups


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file, not a folder")
    with pytest.raises(EnvironmentUnfit, match="MESHWRIGHT_CACHE"):
        save_cluster(catalog.load_cluster("local"), path=in_the_way / "clusters" / "local.json")
