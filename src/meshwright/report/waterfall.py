"""The step as a waterfall: from the model's work at the peak of the devices down to the time it takes, cause by cause.

The first bar is what the model's FLOPs would take were every device busy at its peak, so that it is MFU of the step;
every other bar is time lost to one cause. Bars are exposed seconds, as the lines of a Report are.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.report import LineName, Report
from meshwright.spec.units import format_seconds

IDEAL = "ideal compute at peak"
UNEVEN = "work beyond an even share"
KERNELS = "kernels below peak"
COMPUTE = "forward and backward"
UNEXPLAINED = "not in any line"
_WORK = (LineName.FORWARD, LineName.BACKWARD)
_NOTES = {
    IDEAL: "the model's FLOPs over the peak of all devices",
    UNEVEN: "more than the device's share by its peak: stages that are not even, scores that are computed and masked",
    KERNELS: "products, attention and what moves memory are slower than the peak",
    COMPUTE: "the peak is not known",
    UNEXPLAINED: "the step less its lines",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One cause: its seconds, the seconds of all bars before it, its share of the step and what is said of it."""

    name: str
    seconds: float
    start: float
    share: float
    note: str = ""

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Bars in the order in which causes add up; their seconds sum to `step_seconds`."""

    bars: tuple[Bar, ...]
    step_seconds: float
    mfu: float | None

    def seconds(self, name: str) -> float:
        """Seconds of the bar of that name; 0 where there is none."""
        return next((bar.seconds for bar in self.bars if bar.name == name), 0.0)


def waterfall(report: Report) -> Waterfall:
    """The bars of `report`, without those that are nothing. The sum of the bars is the step.

    Forward and backward are one bar where the peak is not known, or where they take less than the model's FLOPs would
    at the peak; they are not cut at the busiest rank's FLOPs where the report (a measured one) does not have them.
    """
    step = report.step_seconds
    work = sum(line.seconds for line in report.step.lines if line.name in _WORK)
    found = _compute(report, work)
    order = [name.value for name in LineName]
    rest = [line for line in report.step.lines if line.name not in _WORK]
    rest.sort(key=lambda line: order.index(line.name) if line.name in order else len(order))
    found += [(str(line.name), line.seconds, line.note) for line in rest]
    left = step - work - sum(line.seconds for line in rest)
    if abs(left) > 1e-9 * step:
        found.append((UNEXPLAINED, left, _NOTES[UNEXPLAINED]))
    bars, start = [], 0.0
    for name, seconds, note in found:
        if abs(seconds) <= 1e-9 * step and name != IDEAL:
            continue
        share = seconds / step if step else 0.0
        bars.append(Bar(name=name, seconds=seconds, start=start, share=share, note=note))
        start += seconds
    return Waterfall(bars=tuple(bars), step_seconds=step, mfu=report.mfu)


def _compute(report: Report, work: float) -> list[tuple[str, float, str]]:
    """Forward and backward cut in what the peak would take, what is done beyond it, and how far below it kernels are.

    The busiest rank's FLOPs are those of `detail["flops"]`, and its device's peak is `detail["busiest_peak_flops"]`, or
    that of all devices on the mean: an even share takes every device as long at its peak. The excess is not counted
    where kernels would then come out faster than the peak.
    """
    if not report.peak_flops or not work:
        return [(COMPUTE, work, _NOTES[COMPUTE])]
    ideal = report.model_flops / report.peak_flops
    if ideal > work:
        note = f"fewer FLOPs than the model's formula counts, which take {format_seconds(ideal)} at the peak"
        return [(COMPUTE, work, note)]
    peak = report.detail.get("busiest_peak_flops", report.peak_flops / report.devices)
    busiest = report.detail.get("flops", 0.0) / peak
    excess = busiest - ideal if ideal < busiest <= work else 0.0
    bars = [(IDEAL, ideal), (UNEVEN, excess), (KERNELS, work - ideal - excess)]
    passes = " and ".join(
        f"{line.name} takes {format_seconds(line.seconds)}" for line in report.step.lines if line.name in _WORK
    )
    notes = {**_NOTES, KERNELS: f"{passes}: {_NOTES[KERNELS]}"}
    return [(name, seconds, notes[name]) for name, seconds in bars]
