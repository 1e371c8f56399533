"""Times into parameters: saturating matrix curves and latency-bandwidth lines, by least squares on log time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from meshwright.run.measure_device import MatrixTime
from meshwright.run.measure_network import CollectiveTime
from meshwright.spec.cluster import CollectiveFit, MatrixCurve

Array = npt.NDArray[np.float64]


def fit_matrix_curve(times: Sequence[MatrixTime], *, peak: float, launch: float) -> MatrixCurve:
    """The curve of MatrixCurve's formula that is nearest to `times` in log seconds; fraction in (0, 1], halves >= 0.

    Gauss-Newton in the logs of the four parameters from several starts, with a weak pull towards the start so that a
    dim the shapes do not tell apart stays small.
    """
    sizes = np.array([(time.m, time.n, time.k) for time in times], dtype=np.float64)
    seconds = np.array([time.seconds for time in times])
    flops = 2.0 * sizes.prod(axis=1)

    def predicted(logs: Array) -> Array:
        fraction, halves = 1.0 / (1.0 + math.exp(-logs[0])), np.exp(logs[1:])
        return np.asarray(flops / (peak * fraction * (sizes / (sizes + halves)).prod(axis=1)) + launch)

    starts = [np.log(np.array([3.0, half, half, half])) for half in (2.0, 16.0, 64.0)]
    fits = [least_log_squares(predicted, seconds, start=start, pull=1e-3) for start in starts]
    best = min(fits, key=lambda logs: float(np.square(np.log(predicted(logs) / seconds)).sum()))
    halves = np.exp(best[1:])
    return MatrixCurve(
        fraction=1.0 / (1.0 + math.exp(-best[0])),
        half_m=float(halves[0]),
        half_n=float(halves[1]),
        half_k=float(halves[2]),
    )


def fit_collective(times: Sequence[CollectiveTime]) -> CollectiveFit:
    """latency + bytes / bandwidth nearest in log seconds to times of one operation among one number of ranks."""
    num_bytes = np.array([float(time.num_bytes) for time in times])
    seconds = np.array([time.seconds for time in times])

    def predicted(logs: Array) -> Array:
        return np.asarray(np.exp(logs[0]) + num_bytes * np.exp(logs[1]))

    start = np.log(np.array([seconds.min(), seconds.max() / num_bytes.max()]))
    latency, per_byte = np.exp(least_log_squares(predicted, seconds, start=start, pull=1e-3))
    return CollectiveFit(
        operation=times[0].operation,
        ranks=times[0].ranks,
        latency_seconds=float(latency),
        bytes_per_second=float(1.0 / per_byte),
    )


def least_log_squares(
    predicted: Callable[[Array], Array], seconds: Array, *, start: Array, pull: float, rounds: int = 60
) -> Array:
    """Logs of parameters that make log(predicted / seconds) smallest in squares, plus `pull` times their way squared.

    Levenberg's damped steps: one that makes it worse is not taken.
    """
    logs, damping = start.astype(np.float64), 1e-2

    def residuals(at: Array) -> Array:
        return np.concatenate([np.log(predicted(at) / seconds), math.sqrt(pull) * (at - start)])

    current = residuals(logs)
    for _ in range(rounds):
        steps = np.eye(len(logs)) * 1e-4
        jacobian = np.stack([(residuals(logs + step) - current) / 1e-4 for step in steps], axis=1)
        normal = jacobian.T @ jacobian + damping * np.eye(len(logs))
        change = np.clip(-np.linalg.solve(normal, jacobian.T @ current), -2.0, 2.0)
        trial = residuals(logs + change)
        if trial @ trial < current @ current:
            logs, current, damping = logs + change, trial, damping / 3.0
            if float(np.abs(change).max()) < 1e-6:
                break
        else:
            damping *= 4.0
    return logs


def left_out_errors(predicted: Callable[[Array], Array], seconds: Array, *, at: Array, pull: float) -> Array:
    """log(predicted / seconds) of every observation had least_log_squares, ended `at`, not been given it.

    The exact value where the logs are linear in the parameters: e / (1 - h), h the observation's leverage.
    """
    error = np.log(predicted(at) / seconds)
    steps = np.eye(len(at)) * 1e-4
    jacobian = np.stack([(np.log(predicted(at + step) / seconds) - error) / 1e-4 for step in steps], axis=1)
    leverage = np.einsum(
        "ij,ji->i", jacobian, np.linalg.solve(jacobian.T @ jacobian + pull * np.eye(len(at)), jacobian.T)
    )
    return np.asarray(error / np.maximum(1.0 - leverage, 0.05))
