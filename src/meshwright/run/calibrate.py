"""calibrate: moves a cluster's figures until the cost model explains measured steps, as little as they ask for.

Every figure is moved in the log of its value with a prior around what was measured alone (a ridge), so that few
steps can never carry it far away; figures that nothing measures alone have wide priors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright import cost
from meshwright.run.fit import Array, least_log_squares, left_out_errors
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, Link, MatrixCurve
from meshwright.spec.plan import Design

# Spread of what is not explained, in log seconds: what separate runs of one plan differ by.
_NOISE = 0.04
_ROUNDS = 6
# Steps that the moved figures still miss by this much in the mean were disturbed by other programs.
_WORST_ERROR = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One plan that ran, and the seconds of its step."""

    design: Design
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a cluster that may be moved: `spread` is the standard deviation of its log around its start.

    `start` replaces a value of zero, which has no log.
    """

    name: str
    read: Callable[[ClusterSpec], float]
    write: Callable[[ClusterSpec, float], ClusterSpec]
    spread: float
    start: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The moved cluster, and the mean of |log(predicted / measured)| before and after.

    `left_out` is the root mean square of that log for every step if the figures had been moved without it; the
    cluster keeps it as its step_error.
    """

    cluster: ClusterSpec
    before: float
    after: float
    left_out: float
    moved: tuple[tuple[str, float, float], ...]


def calibrate(cluster: ClusterSpec, observations: Sequence[Observation], *, stamp: str) -> Calibration:
    """The figures of `cluster` that explain the observations best, each with `stamp` as its source.

    Observations may be of any plans on this cluster. A figure that it does not have stays unsaid. The cluster comes
    back as it is, with nothing moved, when there are none, when no move explains them better, or when they contradict
    each other, as on a machine busy otherwise.
    """
    before = _mean_error(cluster, observations)
    if not observations:
        return Calibration(cluster=cluster, before=before, after=before, left_out=0.0, moved=())
    figures = [figure for figure in FIGURES if _start(figure, cluster)]
    starts = [_start(figure, cluster) for figure in figures]
    spreads = np.array([figure.spread for figure in figures])
    seconds = np.array([observation.seconds for observation in observations])

    def predicted(scaled: Array) -> Array:
        return _predict(_with(cluster, figures, np.array(starts) * np.exp(scaled * spreads)), observations)

    scaled = least_log_squares(predicted, seconds, start=np.zeros(len(figures)), pull=_NOISE**2, rounds=_ROUNDS)
    values = np.array(starts) * np.exp(scaled * spreads)
    found = _with(cluster, figures, values)
    after = _mean_error(found, observations)
    if after >= min(before, _WORST_ERROR):
        missed = _root_mean_square(_log_errors(cluster, observations))
        kept = replace(cluster, step_error=missed)
        return Calibration(cluster=kept, before=before, after=before, left_out=missed, moved=())
    left_out = _root_mean_square(left_out_errors(predicted, seconds, at=scaled, pull=_NOISE**2))
    found = replace(_stamped(found, figures, stamp), step_error=left_out)
    moved = tuple((figure.name, was, float(now)) for figure, was, now in zip(figures, starts, values, strict=True))
    return Calibration(cluster=found, before=before, after=after, left_out=left_out, moved=moved)


def _predict(cluster: ClusterSpec, observations: Sequence[Observation]) -> Array:
    designs = [replace(observation.design, cluster=cluster) for observation in observations]
    return np.array([report.step_seconds for report in cost.predict_all(designs)])


def _mean_error(cluster: ClusterSpec, observations: Sequence[Observation]) -> float:
    if not observations:
        return 0.0
    return float(np.abs(_log_errors(cluster, observations)).mean())


def _log_errors(cluster: ClusterSpec, observations: Sequence[Observation]) -> Array:
    seconds = np.array([observation.seconds for observation in observations])
    return np.asarray(np.log(_predict(cluster, observations) / seconds))


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _start(figure: Figure, cluster: ClusterSpec) -> float:
    return figure.read(cluster) or figure.start


def _with(cluster: ClusterSpec, figures: Sequence[Figure], values: Array) -> ClusterSpec:
    for figure, value in zip(figures, values, strict=True):
        cluster = figure.write(cluster, float(value))
    return cluster


def _stamped(cluster: ClusterSpec, figures: Sequence[Figure], stamp: str) -> ClusterSpec:
    sources = {figure.name: f"{stamp}; moved to explain whole steps" for figure in figures if "." not in figure.name}
    return _device(cluster, lambda device: replace(device, sources=dict(device.sources) | sources))


def _device(cluster: ClusterSpec, change: Callable[[DeviceSpec], DeviceSpec]) -> ClusterSpec:
    group = cluster.groups[0]
    return replace(cluster, groups=(replace(group, device=change(group.device)), *cluster.groups[1:]))


def _inside(cluster: ClusterSpec, change: Callable[[Link], Link]) -> ClusterSpec:
    group = cluster.groups[0]
    return replace(cluster, groups=(replace(group, inside=change(group.inside)), *cluster.groups[1:]))


def _field(name: str, *, spread: float, start: float = 0.0) -> Figure:
    """A number of the device by its name."""

    def write(cluster: ClusterSpec, value: float) -> ClusterSpec:
        changes: dict[str, Any] = {name: value}
        return _device(cluster, lambda device: replace(device, **changes))

    return Figure(name=name, read=_read(name), write=write, spread=spread, start=start)


def _read(name: str) -> Callable[[ClusterSpec], float]:
    return lambda cluster: float(getattr(cluster.groups[0].device, name) or 0.0)


def _memory_fraction(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """The share of the memory bandwidth that steps reach; where it is more than all, the bandwidth is more."""
    return _device(
        cluster,
        lambda device: replace(
            device, memory_bandwidth=device.memory_bandwidth * max(value, 1.0), memory_fraction=min(value, 1.0)
        ),
    )


def _matrix_fraction(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """Every matrix curve at `value` times the fraction that it was fitted with."""

    def scaled(curve: MatrixCurve) -> MatrixCurve:
        return replace(curve, fraction=curve.fraction * value)

    return _device(
        cluster,
        lambda device: replace(device, matrix={key: scaled(curve) for key, curve in device.matrix.items()}),
    )


def _attention_rates(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """Attention at `value` times its rates, or its fractions where no rate was measured."""
    return _device(
        cluster,
        lambda device: (
            replace(
                device,
                attention_rates=tuple(
                    replace(rate, forward_flops=rate.forward_flops * value, backward_flops=rate.backward_flops * value)
                    for rate in device.attention_rates
                ),
            )
            if device.attention_rates
            else replace(
                device,
                attention_fraction=device.attention_fraction * value,
                attention_backward_fraction=device.attention_backward_fraction * value,
            )
        ),
    )


def _scaling(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """What several cores give one worker over one core, `value` times as much."""

    def scaled(device: DeviceSpec) -> DeviceSpec:
        return replace(device, scaling=tuple(1.0 + (speed - 1.0) * value for speed in device.scaling))

    return _device(cluster, scaled)


def _together(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """What several busy cores gain over one, `value` times as much."""
    group = cluster.groups[0]
    known = group.together or tuple(float(count) for count in range(1, (group.cores or 1) + 1))
    together = tuple(1.0 + (speed - 1.0) * value for speed in known)
    return replace(cluster, groups=(replace(group, together=together), *cluster.groups[1:]))


def _fits(cluster: ClusterSpec, *, latency: float = 1.0, rate: float = 1.0) -> ClusterSpec:
    """Every measured collective with its latency and its bandwidth multiplied."""
    return _inside(
        cluster,
        lambda link: replace(
            link,
            fits=tuple(
                replace(
                    fit,
                    latency_seconds=fit.latency_seconds * latency,
                    bytes_per_second=fit.bytes_per_second * rate,
                )
                for fit in link.fits
            ),
        ),
    )


FIGURES: tuple[Figure, ...] = (
    Figure(name="matrix", read=lambda _: 1.0, write=_matrix_fraction, spread=0.05),
    Figure(name="attention_rates", read=lambda _: 1.0, write=_attention_rates, spread=0.05),
    Figure(name="device.scaling", read=lambda _: 1.0, write=_scaling, spread=0.08),
    Figure(name="group.together", read=lambda _: 1.0, write=_together, spread=0.08),
    Figure(name="memory_fraction", read=_read("memory_fraction"), write=_memory_fraction, spread=0.1),
    _field("launch_seconds", spread=0.3),
    _field("layer_seconds", spread=0.5, start=5e-5),
    _field("step_overhead_seconds", spread=1.0, start=1e-3),
    _field("optimizer_bandwidth", spread=0.2),
    _field("tensor_layer_seconds", spread=1.0, start=4e-4),
    _field("context_layer_seconds", spread=1.0, start=4e-4),
    _field("shard_layer_seconds", spread=1.0, start=2e-4),
    _field("action_seconds", spread=1.0, start=2e-4),
    Figure(
        name="inside.latency",
        read=lambda _: 1.0,
        write=lambda cluster, value: _fits(cluster, latency=value),
        spread=0.3,
    ),
    Figure(
        name="inside.bandwidth", read=lambda _: 1.0, write=lambda cluster, value: _fits(cluster, rate=value), spread=0.3
    ),
)
