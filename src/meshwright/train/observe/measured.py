"""From what every rank saw to the measured Report: the same lines as the prediction, summing to the median step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from meshwright.spec.plan import AxisName, Plan
from meshwright.spec.report import Line, LineName, Origin, Report, StageMemory, close
from meshwright.spec.span import Span
from meshwright.train.observe.samples import CollectiveCall, RankSample, StepTiming, coordinates

_COMPUTE = (LineName.FORWARD, LineName.BACKWARD)
_SCALING_NOTE = (
    "collective times are what the host waited in one instrumented step, scaled by how much longer that step took "
    "than the median of the others; compute is the rest of the median spans"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankLines:
    """Seconds by line of one rank's median step; `busy` is its compute alone."""

    rank: int
    seconds: Mapping[str, float]
    step: float

    @property
    def busy(self) -> float:
        names = (*_COMPUTE, LineName.RECOMPUTE, LineName.OPTIMIZER)
        return sum(self.seconds.get(name, 0.0) for name in names)


def measured_report(*, plan: Plan, predicted: Report, ranks: Sequence[RankSample]) -> Report:
    """What the run of `plan` measured, in the form of `predicted`, whose counts and capacities it keeps.

    The step is the median of the steps that no instrument slowed, on the rank whose compute took longest; its lines
    sum to it, `other` being what none explains. Memory is that of the heaviest rank of every pipeline coordinate.
    Ranks without timings are left out; ValueError when none has any.
    """
    idle = _idle_split(plan, ranks)
    lines = [_rank_lines(sample, idle=idle.get(sample.rank)) for sample in ranks if sample.timings]
    if not lines:
        raise ValueError("no rank measured a step")
    slowest = max(lines, key=lambda entry: entry.busy)
    moved = _bytes_by_line(next(sample for sample in ranks if sample.rank == slowest.rank))
    step = Line(
        name=LineName.STEP,
        seconds=slowest.step,
        flops=predicted.model_flops / max(predicted.devices, 1),
        origin=Origin.MEASURED,
        lines=tuple(
            Line(name=name, seconds=seconds, bytes=moved.get(name, 0.0), origin=Origin.MEASURED)
            for name, seconds in slowest.seconds.items()
        ),
    )
    memory = _memory(plan, predicted, ranks)
    report = replace(
        predicted,
        step=step,
        memory=memory,
        error_band=(1.0, 1.0),
        bottleneck=_bottleneck(step),
        software="",
        notes=(*_imbalance(lines), _SCALING_NOTE, *_memory_notes(ranks)),
        detail=_detail(lines, ranks),
    )
    return close(report)


def _rank_lines(sample: RankSample, *, idle: Mapping[str, float] | None) -> _RankLines:
    """Medians of one rank, with collectives taken out of the spans they ran in."""
    spans = _median_by_name(sample)
    met = spans.get(LineName.OUTER, 0.0)
    outside = {span.step: span.seconds for span in sample.spans if span.name == LineName.OUTER}
    step = median(timing.seconds - outside.get(timing.step, 0.0) for timing in sample.timings) + met
    total = sum(spans.values())
    if total > step:
        # Medians of parts may each be of another step.
        spans = {name: seconds * step / total for name, seconds in spans.items()}
    waits, scale = _waits_by_place(sample, step)
    seconds: dict[str, float] = defaultdict(float)
    for name, total in spans.items():
        inside = sum(waits.get(name, {}).values()) * scale
        fit = min(1.0, total / inside) if inside > 0 else 1.0
        seconds[name] += total - inside * fit
        for line, wait in waits.get(name, {}).items():
            seconds[line] += wait * scale * fit
    if sample.recompute_seconds and sample.sampled is not None:
        recompute = min(sample.recompute_seconds * scale, seconds.get(LineName.BACKWARD, 0.0))
        seconds[LineName.RECOMPUTE] += recompute
        seconds[LineName.BACKWARD] -= recompute
    room = step - sum(spans.values())
    for line, wait in waits.get("", {}).items():
        # In a pipeline what waits between passes is idle time, split below; a loss's reduction waits for the last rank.
        if line == LineName.TRANSFER or (idle and line == LineName.OTHER):
            continue
        share = min(wait * scale, max(room, 0.0))
        seconds[line] += share
        room -= share
    for line, share in (idle or {}).items():
        seconds[line] += max(room, 0.0) * share
    seconds.pop(LineName.OTHER, None)
    return _RankLines(rank=sample.rank, seconds=dict(seconds), step=step)


def _median_by_name(sample: RankSample) -> dict[str, float]:
    """Median seconds a step of every kind of span, and of the input and optimizer sections.

    Of what learners do to meet the mean, for most of their steps have nothing of it.
    """
    timed = {timing.step for timing in sample.timings}
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    seen: set[int] = set()
    for span in sample.spans:
        if span.step in timed:
            seen.add(span.step)
            sums[span.name][span.step] += span.seconds
    found = {
        name: (mean if name == LineName.OUTER else median)(by_step.get(step, 0.0) for step in seen)
        for name, by_step in sums.items()
    }
    found[LineName.INPUT] = median(timing.input_seconds for timing in sample.timings)
    found[LineName.OPTIMIZER] = median(timing.optimizer_seconds for timing in sample.timings)
    return found


def _waits_by_place(sample: RankSample, step: float) -> tuple[dict[str, dict[str, float]], float]:
    """Seconds of collectives by the span they ran in ("" outside of all) and line; and the factor to a plain step."""
    if sample.sampled is None:
        return {}, 1.0
    places: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    end = sample.sampled.start + sample.sampled.seconds
    for call in sample.collectives:
        name = next((span.name for span in sample.sampled_spans if _within(call, span)), None)
        if name is None and call.held_from >= end - sample.sampled.optimizer_seconds:
            name = LineName.OPTIMIZER
        line = name if call.line is LineName.OTHER and name else call.line
        places[name or ""][line] += call.seconds
    return places, min(1.0, step / sample.sampled.seconds)


def _within(call: CollectiveCall, span: Span) -> bool:
    return span.start <= call.held_from <= span.start + span.seconds


def _idle_split(plan: Plan, ranks: Sequence[RankSample]) -> dict[int, dict[str, float]]:
    """Shares of a pipeline rank's idle time: transfer once its input was made, bubble until then.

    The input of F(stage, microbatch) is made when F(stage - 1, microbatch) ends, on whichever rank; that of
    B(stage, microbatch) when B(stage + 1, microbatch) ends. Halves of a backward, and slices of a microbatch, are one
    span after the other under one name, of which the first, the second and so on belong together.
    """
    if plan.pipeline == 1:
        return {}
    ends: dict[tuple[object, ...], float] = {}
    for sample in ranks:
        place = coordinates(plan, rank=sample.rank)
        lane = tuple(place[axis.name] for axis in plan.axes if axis.name is not AxisName.PIPELINE)
        for span, turn in _in_turn(sample):
            key = (lane, span.step, span.name, span.stage, span.microbatch, turn)
            ends[key] = span.start + span.seconds + sample.clock_offset
    shares = {}
    for sample in ranks:
        place = coordinates(plan, rank=sample.rank)
        lane = tuple(place[axis.name] for axis in plan.axes if axis.name is not AxisName.PIPELINE)
        shares[sample.rank] = _idle_of(sample, lane, ends)
    return shares


def _idle_of(sample: RankSample, lane: tuple[int, ...], ends: Mapping[tuple[object, ...], float]) -> dict[str, float]:
    transfer = bubble = 0.0
    previous: Span | None = None
    for span, turn in _in_turn(sample):
        if previous is not None and previous.step == span.step:
            free = previous.start + previous.seconds + sample.clock_offset
            source = span.stage - 1 if span.name == LineName.FORWARD else span.stage + 1
            ready = ends.get((lane, span.step, span.name, source, span.microbatch, turn), free)
            begun = span.start + sample.clock_offset
            ready = min(max(ready, free), max(begun, free))
            bubble += ready - free
            transfer += max(begun - ready, 0.0)
        previous = span
    bubble += sum(_edges(sample))
    total = transfer + bubble
    return {LineName.TRANSFER: transfer / total, LineName.BUBBLE: bubble / total} if total > 0 else {}


def _edges(sample: RankSample) -> Iterable[float]:
    """Idle time before the first and after the last compute of every timed step, input and optimizer left out."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in _compute_spans(sample):
        by_step[span.step].append(span)
    for timing in sample.timings:
        spans = by_step.get(timing.step)
        if spans:
            first = min(span.start for span in spans)
            last = max(span.start + span.seconds for span in spans)
            yield max(first - timing.start - timing.input_seconds, 0.0)
            end = timing.start + timing.seconds - timing.optimizer_seconds
            yield max(end - last, 0.0)


def _in_turn(sample: RankSample) -> Iterable[tuple[Span, int]]:
    """Spans of compute by their start, each with how many of its step, name, stage and microbatch came before."""
    seen: Counter[tuple[object, ...]] = Counter()
    for span in sorted(_compute_spans(sample), key=lambda span: span.start):
        key = (span.step, span.name, span.stage, span.microbatch)
        yield span, seen[key]
        seen[key] += 1


def _compute_spans(sample: RankSample) -> list[Span]:
    timed = {timing.step for timing in sample.timings}
    return [span for span in sample.spans if span.name in _COMPUTE and span.step in timed]


def _bytes_by_line(sample: RankSample) -> dict[str, float]:
    moved: dict[str, float] = defaultdict(float)
    for call in sample.collectives:
        moved[call.line] += call.bytes
    return moved


def _memory(plan: Plan, predicted: Report, ranks: Sequence[RankSample]) -> tuple[StageMemory, ...]:
    capacity = {stage.rank: stage.capacity for stage in predicted.memory}
    heaviest: dict[int, RankSample] = {}
    for sample in ranks:
        place = coordinates(plan, rank=sample.rank).get(AxisName.PIPELINE, 0)
        best = heaviest.get(place)
        if sample.memory and (best is None or best.memory is None or sample.memory.total > best.memory.total):
            heaviest[place] = sample
    return tuple(
        StageMemory(rank=place, parts=dict(sample.memory.parts), capacity=capacity.get(place, 0.0))
        for place, sample in sorted(heaviest.items())
        if sample.memory is not None
    )


def _memory_notes(ranks: Iterable[RankSample]) -> tuple[str, ...]:
    notes = dict.fromkeys(sample.memory.note for sample in ranks if sample.memory and sample.memory.note)
    return tuple(f"memory: {note}" for note in notes)


def _imbalance(lines: Sequence[_RankLines]) -> tuple[str, ...]:
    if len(lines) < 2:
        return ()
    busiest, idlest = max(line.busy for line in lines), min(line.busy for line in lines)
    mean = sum(line.busy for line in lines) / len(lines)
    excess = 100.0 * (busiest / mean - 1.0) if mean else 0.0
    spread = f"compute of the busiest rank {busiest * 1e3:.1f} ms, of the idlest {idlest * 1e3:.1f} ms"
    return (f"{spread}: the busiest is {excess:.1f} % above the mean",)


def _detail(lines: Sequence[_RankLines], ranks: Sequence[RankSample]) -> dict[str, float]:
    timings: list[StepTiming] = [timing for sample in ranks for timing in sample.timings]
    steps = sorted(timing.seconds for timing in timings)
    slowed = [sample.sampled.seconds for sample in ranks if sample.sampled is not None]
    found = {
        "measured steps": float(len({timing.step for timing in timings})),
        "fastest step seconds": steps[0],
        "slowest step seconds": steps[-1],
        "busiest compute seconds": max(line.busy for line in lines),
        "idlest compute seconds": min(line.busy for line in lines),
    }
    return found | ({"instrumented step seconds": max(slowed)} if slowed else {})


def _bottleneck(step: Line) -> str:
    worst = max(step.lines, key=lambda line: line.seconds, default=None)
    if worst is None or not step.seconds:
        return ""
    return f"{worst.name}: {100.0 * worst.seconds / step.seconds:.0f} % of the step"
