"""Report: what a plan costs, as a tree of named lines. Predicted, counted and measured are this one type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from meshwright.spec.outlook import Outlook
from meshwright.spec.units import format_bytes


class Origin(StrEnum):
    """Where a figure is from: formulas and data sheets, formulas fitted on this machine, a dry run, a real run."""

    ANALYTIC = "analytic"
    CALIBRATED = "calibrated"
    COUNTED = "counted"
    MEASURED = "measured"


class LineName(StrEnum):
    """The lines every report has under `step`; measured spans carry the same names."""

    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    TENSOR = "tensor collectives"
    CONTEXT = "context exchange"
    EXPERTS = "expert exchange"
    HOST = "host transfer"
    TRANSFER = "pipeline transfer"
    BUBBLE = "pipeline bubble"
    GRADIENTS = "gradient collectives"
    PARAMETERS = "parameter collectives"
    OUTER = "outer synchronisation"
    OPTIMIZER = "optimizer"
    INPUT = "input"
    OTHER = "other"


class MemoryPart(StrEnum):
    """What memory holds at the peak of a stage."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUFFERS = "buffers"
    RESERVED = "reserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: exposed seconds of one step on the slowest rank, bytes moved and FLOPs done by one device."""

    name: str
    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    origin: Origin = Origin.ANALYTIC
    note: str = ""
    lines: tuple[Line, ...] = ()

    def find(self, name: str) -> Line | None:
        return next((line for _, line in self.walk() if line.name == name), None)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Line]]:
        yield depth, self
        for line in self.lines:
            yield from line.walk(depth + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes at the peak of the heaviest device of pipeline rank `rank`, by part; `capacity` is what it may use.

    Of what an allocator reserves, tensors fill `filled`; the rest is fragments. 1 where there is no such allocator.
    `host` is what it keeps in the host's memory at the most, of what is offloaded, and `host_capacity` its share of
    that memory; None where that is not known.
    """

    rank: int
    parts: Mapping[str, float]
    capacity: float
    filled: float = 1.0
    host: float = 0.0
    host_capacity: float | None = None

    @property
    def over(self) -> float:
        """Bytes for which there is no room, on the device or in the host's memory; below 0 where all has room."""
        beside = -math.inf if self.host_capacity is None else self.host - self.host_capacity
        return max(self.total - self.capacity, beside if self.host else -math.inf)

    @property
    def need(self) -> str:
        """`needs 90.3 GiB, has 74.4 GiB`, of the memory that has no room, else of the device's."""
        if self.total <= self.capacity and self.host_capacity is not None and self.host > self.host_capacity:
            return f"needs {format_bytes(self.host)} of the host's memory, has {format_bytes(self.host_capacity)}"
        return f"needs {format_bytes(self.total)}, has {format_bytes(self.capacity)}"

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """Without what the context and libraries reserve: what the run itself allocates."""
        return self.total - self.parts.get(MemoryPart.RESERVED, 0.0)

    @property
    def reserved(self) -> float:
        """What the allocator holds of the device to give the run what it allocates, fragments with it."""
        return self.allocated / self.filled


_NO_MEMORY = StageMemory(rank=0, parts={}, capacity=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one plan costs. The lines under `step` sum to its seconds (`balanced` says so).

    `error_band` bounds the step time as multiples of it: nine of ten measured steps lie inside, if errors stay what
    they were; `doubts` are the standard deviations of log(measured / predicted) that its causes give, each by itself.
    `fit_probability` is that every rank fits, `outlook` the whole run with its failures; None of what was measured.
    `peak_flops` is of all devices together; None where the peak is not known, and then MFU is None. `software` is what
    the seconds and bytes of a prediction are of, by its name; empty of what was counted or measured.
    """

    plan: str
    step: Line
    memory: tuple[StageMemory, ...]
    tokens_per_step: int
    devices: int
    model_flops: float
    peak_flops: float | None
    error_band: tuple[float, float] = (1.0, 1.0)
    doubts: Mapping[str, float] = field(default_factory=dict)
    fit_probability: float | None = None
    outlook: Outlook | None = None
    bottleneck: str = ""
    total_tokens: int = 0
    price_per_hour: float | None = None
    software: str = ""
    notes: tuple[str, ...] = ()
    detail: Mapping[str, float] = field(default_factory=dict)
    schema: int = 1

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: model FLOPs of a step over what all devices could do in its time."""
        if not self.peak_flops or not self.step_seconds:
            return None
        return self.model_flops / (self.step_seconds * self.peak_flops)

    @property
    def peak_bytes(self) -> float:
        return max((stage.total for stage in self.memory), default=0.0)

    @property
    def allocated_bytes(self) -> float:
        return max((stage.allocated for stage in self.memory), default=0.0)

    @property
    def fits(self) -> bool:
        return all(stage.over <= 0.0 for stage in self.memory)

    @property
    def fullest(self) -> StageMemory:
        """The pipeline rank with least room left on its device."""
        return min(self.memory, key=lambda stage: stage.capacity - stage.total, default=_NO_MEMORY)

    @property
    def tightest(self) -> StageMemory:
        """The pipeline rank with least room left, on its device or in the host's memory."""
        return max(self.memory, key=lambda stage: stage.over, default=_NO_MEMORY)

    @property
    def total_seconds(self) -> float:
        """Seconds of training to the token target; `outlook` adds the failures."""
        return self.total_tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    @property
    def total_cost(self) -> float | None:
        """Dollars to the token target, with the failures on the way where they are foreseen."""
        if self.outlook is not None and self.outlook.dollars is not None:
            return self.outlook.dollars
        return None if self.price_per_hour is None else self.price_per_hour * self.total_seconds / 3600.0

    def share(self, *names: str) -> float:
        """Share of the step that the named lines take."""
        found = (self.step.find(name) for name in names)
        return sum(line.seconds for line in found if line) / self.step_seconds if self.step_seconds else 0.0

    @property
    def balanced(self) -> bool:
        return abs(sum(line.seconds for line in self.step.lines) - self.step_seconds) <= 1e-6 * max(
            self.step_seconds, 1e-9
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One line of predicted against measured; `seconds` is measured less predicted."""

    name: str
    predicted: float
    measured: float
    unit: str = "s"

    @property
    def seconds(self) -> float:
        return self.measured - self.predicted

    @property
    def relative(self) -> float | None:
        return self.predicted / self.measured - 1.0 if self.measured else None


def diff(predicted: Report, measured: Report) -> tuple[Gap, ...]:
    """The gap of every line that either report has, the largest in seconds first, the step itself at the head."""
    names = dict.fromkeys(line.name for report in (predicted, measured) for line in report.step.lines)
    gaps = []
    for name in names:
        ours, theirs = predicted.step.find(name), measured.step.find(name)
        gaps.append(Gap(name=name, predicted=ours.seconds if ours else 0.0, measured=theirs.seconds if theirs else 0.0))
    gaps.sort(key=lambda gap: -abs(gap.seconds))
    head = Gap(name=LineName.STEP, predicted=predicted.step_seconds, measured=measured.step_seconds)
    return (head, *gaps)


_ROUNDING = 1e-12


def close(report: Report) -> Report:
    """The report with a line `other` that makes its lines sum to the step."""
    rest = report.step.seconds - sum(line.seconds for line in report.step.lines if line.name != LineName.OTHER)
    rest = 0.0 if abs(rest) <= _ROUNDING * report.step.seconds else rest
    lines = tuple(line for line in report.step.lines if line.name != LineName.OTHER)
    origin = report.step.origin
    other = Line(name=LineName.OTHER, seconds=rest, origin=origin)
    return replace(report, step=replace(report.step, lines=(*lines, other)))
