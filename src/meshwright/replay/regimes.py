"""Regimes: what most of a step beside useful compute goes to, so that errors are told apart by cause."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from meshwright.spec.report import LineName, Report

_PLAIN = 0.15  # of the step: what is less decides nothing


class Regime(StrEnum):
    COMPUTE = "compute"
    LAUNCH = "launches"
    RECOMPUTE = "recompute"
    PIPELINE = "pipeline"
    LAYERS = "traffic of layers"
    DATA = "traffic of gradients and parameters"


_LINES: Mapping[Regime, tuple[LineName, ...]] = MappingProxyType(
    {
        Regime.RECOMPUTE: (LineName.RECOMPUTE,),
        Regime.PIPELINE: (LineName.BUBBLE, LineName.TRANSFER),
        Regime.LAYERS: (LineName.TENSOR, LineName.CONTEXT, LineName.EXPERTS),
        Regime.DATA: (LineName.GRADIENTS, LineName.PARAMETERS, LineName.OUTER),
    }
)


def regime(report: Report) -> Regime:
    """The largest of launches, recompute, pipeline and traffic where it takes 15 % of the step, else compute."""
    shares = {name: report.share(*lines) for name, lines in _LINES.items()}
    shares[Regime.LAUNCH] = launch_share(report)
    largest = max(shares, key=lambda name: shares[name])
    return largest if shares[largest] >= _PLAIN else Regime.COMPUTE


def launch_share(report: Report) -> float:
    """Share of the step in which the device waits for the host to start its kernels."""
    found = (report.step.find(name) for name in (LineName.FORWARD, LineName.BACKWARD))
    seconds = sum(part.seconds for line in found if line for part in line.lines if part.name == "host")
    return seconds / report.step_seconds if report.step_seconds else 0.0
