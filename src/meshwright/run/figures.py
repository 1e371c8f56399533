"""From what the children measured to the figures of a ClusterSpec, each with its source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

import numpy as np

from meshwright.cost.operators import block_work
from meshwright.cost.work import Sizes
from meshwright.run.fit import fit_collective, fit_matrix_curve
from meshwright.run.in_step import as_in_a_step
from meshwright.run.measure_device import NARROW_TOKENS, AttentionTime, DeviceTimes, MatrixTime, tiny_model
from meshwright.run.measure_network import CollectiveTime, NetworkTimes
from meshwright.spec.cluster import AttentionRate, ClusterSpec, Collective, DeviceKind, DeviceSpec, Link, Precision
from meshwright.spec.report import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the children brought back: one core, how much faster one worker is on all cores, the workers together."""

    one: DeviceTimes
    gain: float
    cores: int
    network: NetworkTimes | None


def with_measurements(base: ClusterSpec, measured: Measured, *, stamp: str) -> ClusterSpec:
    """`base` with every measured figure in its place and `stamp` as the source of each."""
    group = base.groups[0]
    network = measured.network
    device = _device(group.device, measured, stamp=stamp)
    inside = _link(group.inside, network, stamp=stamp) if network else group.inside
    together = _filled(network.together) if network and group.cores else group.together
    group = replace(group, device=device, inside=inside, together=together)
    return replace(base, groups=(group, *base.groups[1:]), origin=Origin.CALIBRATED, source=stamp)


def _device(device: DeviceSpec, measured: Measured, *, stamp: str) -> DeviceSpec:
    one = measured.one
    by_precision: dict[Precision, list[MatrixTime]] = defaultdict(list)
    for time in one.matrices:
        by_precision[time.precision].append(time)
    rates = {p: max(_rate(time) for time in times) for p, times in by_precision.items()}
    on_processor = device.kind is DeviceKind.CPU
    peaks = rates if on_processor else rates | dict(device.peak_flops)
    launch, layer = _host_seconds(one)
    curves = {
        p: fit_matrix_curve(times, peak=peaks[p], launch=launch) for p, times in by_precision.items() if p in peaks
    }
    found = replace(
        device,
        peak_flops=peaks,
        matrix=dict(device.matrix) | curves,
        memory_bandwidth=one.copy_bytes_per_second,
        memory_fraction=1.0,
        attention_rates=tuple(_attention_rates(one)),
        launch_seconds=launch,
        layer_seconds=layer,
        step_overhead_seconds=one.step_overhead_seconds,
        optimizer_bandwidth=one.optimizer_bytes_per_second,
        reserved_bytes=float(measured.network.resident_bytes) if measured.network else device.reserved_bytes,
        scaling=_scaling(measured) if on_processor else device.scaling,
        sources=_sources(device, one, stamp=stamp),
    )
    return as_in_a_step(found, one.layers)


def _host_seconds(one: DeviceTimes) -> tuple[float, float]:
    """(launch, layer) seconds such that k launches and one layer explain a narrow layer forward, 2k and one backward.

    k is how many operators the cost model counts in that layer. Where noise leaves no such pair, the time of one small
    operator is the launch and the rest of the forward is the layer.
    """
    sizes = Sizes(
        batch=np.ones(1), sequence=float(NARROW_TOKENS), tensor=np.ones(1), split=np.ones(1), itemsize=np.full(1, 4.0)
    )
    kernels = float(np.sum([part.kernels for part in block_work(tiny_model(layers=1).layers[0], sizes)]))
    forward, backward = one.layer_forward_seconds, one.layer_backward_seconds
    launch = (backward - forward) / kernels
    if 0.25 * one.launch_seconds <= launch <= forward / kernels:
        return launch, forward - kernels * launch
    return one.launch_seconds, max(forward - kernels * one.launch_seconds, 0.0)


def _attention_rates(one: DeviceTimes) -> list[AttentionRate]:
    """For every precision and length, the rate of wide heads and the width that reaches half of it.

    Seconds per score are a + b * head_dim: the softmax and the products. half_dim is a / b.
    """
    by_length: dict[tuple[Precision, int], list[AttentionTime]] = defaultdict(list)
    for time in one.attention:
        by_length[time.precision, time.length].append(time)
    found = []
    for (precision, length), times in by_length.items():
        half = geometric_mean([_half_dim(times, backward=False), _half_dim(times, backward=True)])
        forward = [time.flops * (1.0 + half / time.head_dim) / time.forward_seconds for time in times]
        backward = [2.5 * time.flops * (1.0 + half / time.head_dim) / time.backward_seconds for time in times]
        found.append(
            AttentionRate(
                precision=precision,
                length=length,
                forward_flops=geometric_mean(forward),
                backward_flops=geometric_mean(backward),
                half_dim=half,
            )
        )
    return found


def _half_dim(times: Sequence[AttentionTime], *, backward: bool) -> float:
    """a / b of the line through seconds per score; between 1 and 128, as noise may turn the line."""
    if len({time.head_dim for time in times}) < 2:
        return 1.0
    seconds = [time.backward_seconds if backward else time.forward_seconds for time in times]
    scores = [time.flops / (4.0 * time.head_dim) for time in times]
    each = [spent / count for spent, count in zip(seconds, scores, strict=True)]
    slope, start = np.polyfit([time.head_dim for time in times], each, 1)
    return float(np.clip(start / slope, 1.0, 128.0)) if slope > 0.0 else 128.0


def _scaling(measured: Measured) -> tuple[float, ...]:
    """Speed of one worker that uses 1 ... all cores, straight between the two ends that were measured."""
    if measured.cores == 1:
        return (1.0,)
    steps = measured.cores - 1
    return tuple(1.0 + (max(measured.gain, 1.0) - 1.0) * index / steps for index in range(measured.cores))


def _link(link: Link, network: NetworkTimes, *, stamp: str) -> Link:
    """The tier with a fit for every collective and group, and the best message rate as its bandwidth."""
    by_kind: dict[tuple[Collective, int], list[CollectiveTime]] = defaultdict(list)
    for time in network.collectives:
        by_kind[time.operation, time.ranks].append(time)
    fits = tuple(fit_collective(times) for times in by_kind.values())
    sends = [fit for fit in fits if fit.operation is Collective.SEND]
    return replace(
        link,
        bandwidth=max(fit.bytes_per_second for fit in sends),
        latency_seconds=min(fit.latency_seconds for fit in sends),
        efficiency=1.0,
        fits=fits,
        sources=dict(link.sources)
        | {"fits": f"{stamp}, {network.backend}"}
        | dict.fromkeys(("bandwidth", "latency_seconds", "efficiency"), f"{stamp}: its best sends"),
    )


def _filled(together: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """The speed of 1, 2, 3 ... workers at once, straight between the counts that were measured, never falling.

    More workers than cores do not do less in all; a fall is another program's time.
    """
    counts, speeds = zip(*sorted(together), strict=True)
    rising = np.maximum.accumulate(speeds)
    return tuple(float(speed) for speed in np.interp(np.arange(1, max(counts) + 1), counts, rising))


def _rate(time: MatrixTime) -> float:
    return 2.0 * time.m * time.k * time.n / time.seconds


def _sources(device: DeviceSpec, one: DeviceTimes, *, stamp: str) -> dict[str, str]:
    """The device's sources with `stamp` for all that was measured; rates of attention leave its fractions unused."""
    names = list(_FIGURES)
    if device.kind is DeviceKind.CPU:
        names += ["peak_flops", "scaling"]
    found = dict(device.sources)
    if one.attention:
        names.append("attention_rates")
        found.pop("attention_fraction", None)
    return found | dict.fromkeys(names, stamp)


_FIGURES = (
    "matrix",
    "memory_bandwidth",
    "memory_fraction",
    "launch_seconds",
    "layer_seconds",
    "step_overhead_seconds",
    "optimizer_bandwidth",
    "reserved_bytes",
)
