"""What one rank saw: step times, spans, collectives and memory. Plain values, so that ranks can send them to rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.cost.vocabulary import rows_of
from meshwright.spec.plan import AxisName, Design, Plan, TensorGrid
from meshwright.spec.report import LineName
from meshwright.spec.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One step on one rank by time.perf_counter(): the whole of it, and its input and optimizer sections."""

    step: int
    start: float
    seconds: float
    input_seconds: float = 0.0
    optimizer_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective as the host met it.

    `seconds` is the time the calling thread was held: the call itself and the wait for its end. What compute hid is
    not in it. `start` is when the call was made, `held_from` when the wait for it began. `bytes` is the whole tensor
    by the convention of CollectiveFit.
    """

    line: LineName
    operation: str
    ranks: int
    bytes: int
    start: float
    held_from: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Bytes of live tensors at the moment when there were most, by MemoryPart; `events` is what was counted."""

    parts: Mapping[str, float]
    events: int = 0
    note: str = ""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """All that one rank knows of its steps. `clock_offset` added to its clock gives the clock of rank 0."""

    rank: int
    timings: tuple[StepTiming, ...]
    spans: tuple[Span, ...] = ()
    sampled: StepTiming | None = None
    sampled_spans: tuple[Span, ...] = ()
    collectives: tuple[CollectiveCall, ...] = ()
    recompute_seconds: float = 0.0
    memory: MemoryPeak | None = None
    clock_offset: float = 0.0


def coordinates(plan: Plan, *, rank: int) -> dict[AxisName, int]:
    """Where `rank` stands on every axis of the plan; the last axis varies fastest over ranks."""
    found: dict[AxisName, int] = {}
    for axis in reversed(plan.axes):
        rank, found[axis.name] = divmod(rank, axis.size)
    return found


def local_vocab(design: Design, *, rank: int) -> int:
    """Columns of the logits that `rank` of the plan makes."""
    plan = design.plan
    place = coordinates(plan, rank=rank).get(AxisName.TENSOR, 0) if plan.tensor_grid is TensorGrid.LINE else 0
    return rows_of(design.model.vocab, tensor=plan.tensor_grid.side(plan.tensor), rank=place)[1]


def axes_spanned(plan: Plan, *, ranks: tuple[int, ...]) -> frozenset[AxisName]:
    """The axes along which the ranks of a group differ."""
    places = [coordinates(plan, rank=rank) for rank in ranks]
    return frozenset(axis.name for axis in plan.axes if len({place[axis.name] for place in places}) > 1)
