"""calibrate: moves a cluster's figures until the cost model explains measured steps, as little as they ask for.

Every figure is moved in the log of its value with a prior around what was measured alone (a ridge), so that few
steps can never carry it far away; figures that nothing measures alone have wide priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright import cost
from meshwright.run.fit import Array, least_log_squares, left_out_errors
from meshwright.run.moved_figures import Figure, change_device, figures_of, spread_of
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import Origin

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

    Observations may be of any plans on this cluster. The cluster comes back as it is, with nothing moved, when there
    are none, when no move explains them better, or when they contradict each other, as on a machine busy otherwise.
    """
    before = _mean_error(cluster, observations)
    if not observations:
        return Calibration(cluster=cluster, before=before, after=before, left_out=0.0, moved=())
    figures = figures_of(cluster)
    starts = np.array([figure.read(cluster) or figure.start for figure in figures])
    spreads = np.array([spread_of(figure, cluster) for figure in figures])
    seconds = np.array([observation.seconds for observation in observations])

    def predicted(scaled: Array) -> Array:
        return _predict(_with(cluster, figures, starts * np.exp(scaled * spreads)), observations)

    scaled = least_log_squares(predicted, seconds, start=np.zeros(len(figures)), pull=_NOISE**2, rounds=_ROUNDS)
    values = starts * np.exp(scaled * spreads)
    found = _with(cluster, figures, values)
    after = _mean_error(found, observations)
    if after >= min(before, _WORST_ERROR):
        missed = _root_mean_square(_log_errors(cluster, observations))
        kept = replace(cluster, step_error=missed)
        return Calibration(cluster=kept, before=before, after=before, left_out=missed, moved=())
    left_out = _root_mean_square(left_out_errors(predicted, seconds, at=scaled, pull=_NOISE**2))
    found = replace(_stamped(found, figures, stamp), step_error=left_out, origin=Origin.CALIBRATED)
    moved = tuple(
        (figure.name, float(was), float(now)) for figure, was, now in zip(figures, starts, values, strict=True)
    )
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


def _with(cluster: ClusterSpec, figures: Sequence[Figure], values: Array) -> ClusterSpec:
    for figure, value in zip(figures, values, strict=True):
        cluster = figure.write(cluster, float(value))
    return cluster


def _stamped(cluster: ClusterSpec, figures: Sequence[Figure], stamp: str) -> ClusterSpec:
    sources = {figure.name: f"{stamp}; moved to explain whole steps" for figure in figures if "." not in figure.name}
    return change_device(cluster, lambda device: replace(device, sources=dict(device.sources) | sources))
