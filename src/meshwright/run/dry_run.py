"""dry_run: one step of any plan counted without its hardware, beside what the cost model predicts of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright import cost
from meshwright.cost.fixed_buffers import workspace_bytes
from meshwright.cost.stacks import OWN, software_name, software_of
from meshwright.cost.traffic_rounds import steps_between
from meshwright.run.children import RaisedThere, in_children
from meshwright.run.dry.count import RankCount, content
from meshwright.run.dry.events import Packed
from meshwright.run.dry.jobs import jobs_of, shared_out
from meshwright.run.dry.worker import PRELOADED, count_ranks, hush, trace_jobs
from meshwright.run.preflight import check_rules
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.counted import count_gaps
from meshwright.spec.errors import Fault, Problem, WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.report import Gap, Line, LineName, MemoryPart, Origin, Report, StageMemory
from meshwright.spec.units import format_bytes, format_seconds

Say = Callable[[str], None]
LIMIT_SECONDS = 3600.0
MOST_PROCESSES = 4
_COMPUTE = (LineName.FORWARD, LineName.BACKWARD, LineName.RECOMPUTE, LineName.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """One step of a plan: `counted` by running it on every pipeline rank with no hardware, beside what was
    `predicted`; `gaps` tells both figure by figure. `whole` traced every layer and microbatch. `seconds` it took."""

    plan: str
    description: str
    counted: Report
    predicted: Report
    gaps: tuple[Gap, ...]
    ranks: tuple[RankCount, ...]
    whole: bool
    seconds: float

    @property
    def fits(self) -> bool:
        return self.counted.fits


def dry_run(design: Design, *, whole: bool = False, say: Say | None = None) -> DryRun:
    """What the real step does on each pipeline rank of `design`, counted operator by operator on fake tensors.

    Probes of few layers and microbatches tell the rest to the byte, and where they do not the whole is traced, as it
    is where `whole` asks for it. Both are of this runtime; a note names what else the design is predicted as.
    `say` is given progress lines. Raises ConfigError with every rule of plans, of the job or of this runtime that the
    design breaks; one that does not fit its devices is counted, and `fits` says so.
    Fault where the step could not be traced, and WorkerFailed where a process that counts was killed.
    """
    begun = time.perf_counter()
    say = say or _nobody
    check_rules(design)
    asked, design = design, as_trained(design)
    found = _counted(design, whole=whole, say=say)
    ranks = tuple(sorted((count for counts in found for count in counts), key=lambda count: count.rank))
    predicted = with_traffic(design, cost.predict(design))
    counted = counted_report(design, predicted, ranks)
    counted = replace(counted, notes=(*_of_others(asked, predicted), *counted.notes))
    return DryRun(
        plan=design.plan.digest(),
        description=design.plan.describe(),
        counted=counted,
        predicted=predicted,
        gaps=count_gaps(predicted, counted),
        ranks=ranks,
        whole=not any(count.probed for count in ranks),
        seconds=time.perf_counter() - begun,
    )


def as_trained(design: Design) -> Design:
    """The design as this runtime trains it, whatever software its job names for predictions."""
    if software_name(design.job, design.cluster) == OWN:
        return design
    return replace(design, job=replace(design.job, software=OWN))


def _of_others(asked: Design, predicted: Report) -> tuple[str, ...]:
    """What a design that is predicted as other software is told beside what it is here."""
    name = software_name(asked.job, asked.cluster)
    if name == OWN:
        return ()
    there = cost.predict(asked)
    told = [f"{format_seconds(each.step_seconds)} and {format_bytes(each.peak_bytes)}" for each in (there, predicted)]
    return (
        f"this is the plan as this runtime trains it, counted and predicted: {told[1]} a step; the design names "
        f"{name}, as which it takes {told[0]}",
    )


def _counted(design: Design, *, whole: bool, say: Say) -> tuple[tuple[RankCount, ...], ...]:
    """What is traced for all pipeline ranks is shared out first, and then what is made of it."""
    plan, processes = design.plan, min(MOST_PROCESSES, os.cpu_count() or 1)
    text = design.to_json()
    jobs = {rank: jobs_of(design, rank=rank, whole=whole).jobs for rank in range(plan.pipeline)}
    shares = shared_out([job for each in jobs.values() for job in each], processes=processes)
    say(f"counting {_number(plan.pipeline, 'pipeline rank')} in {_number(len(shares), 'process', 'es')}")
    known: dict[str, Packed] = {}
    if len(shares) > 1:
        for traced in _in_children(trace_jobs, [{"design": text, "jobs": share} for share in shares], say=say):
            known |= traced
    arguments = []
    for ranks in shares_of(design, processes=processes):
        keys = {job.key for rank in ranks for job in jobs[rank]} & known.keys()
        arguments.append({"design": text, "ranks": ranks, "whole": whole, "known": {key: known[key] for key in keys}})
    return _in_children(count_ranks, arguments, say=say)


def _in_children(function: Callable[..., Any], arguments: Sequence[Mapping[str, Any]], *, say: Say) -> tuple[Any, ...]:
    hush()
    try:
        return in_children(function, arguments, seconds=LIMIT_SECONDS, preload=PRELOADED, say=say)
    except WorkerFailed as error:
        if not isinstance(error.__cause__, RaisedThere):
            raise
        problem = Problem(
            what=f"the step could not be traced: {error.problems[0].what}",
            why="this is a fault of meshwright, not of what you asked",
            fix="please report it with what `meshwright --verbose dryrun` shows",
        )
        raise Fault(problem) from error.__cause__


def shares_of(design: Design, *, processes: int) -> list[list[int]]:
    """Pipeline ranks for each process: those that hold the same stay together."""
    alike: dict[str, list[int]] = {}
    for rank in range(design.plan.pipeline):
        alike.setdefault(content(design, rank), []).append(rank)
    shares: list[list[int]] = [[] for _ in range(min(processes, len(alike)))]
    for ranks in sorted(alike.values(), key=len, reverse=True):
        min(shares, key=len).extend(ranks)
    return shares


def with_traffic(design: Design, predicted: Report) -> Report:
    """The prediction with the bytes that our own runtime sends, on the lines of the rank that it tells of.

    Only of the software that runs here: what others send is theirs.
    """
    if software_name(design.job, design.cluster) != OWN:
        return predicted
    rank = int(predicted.detail.get("busiest_rank", 0.0))
    sent = {line.name: line for line in _collectives({}, cost.traffic(design, rank=rank).bytes, predicted.step.origin)}
    lines = [
        replace(line, bytes=sent[line.name].bytes, lines=(*line.lines, *sent[line.name].lines))
        if line.name in sent
        else line
        for line in predicted.step.lines
    ]
    lines += [line for name, line in sent.items() if predicted.step.find(name) is None]
    total = sum(line.bytes for line in sent.values())
    return replace(predicted, step=replace(predicted.step, bytes=total, lines=tuple(lines)))


def counted_report(design: Design, predicted: Report, ranks: Sequence[RankCount]) -> Report:
    """The counts in the form of `predicted`, whose capacities and reserves they keep; lines tell of the rank that the
    prediction tells of. Nothing is timed: seconds are 0."""
    shown = int(predicted.detail.get("busiest_rank", 0.0))
    chosen = next((count for count in ranks if count.rank == shown), ranks[0])
    lines = [
        Line(name=name, flops=chosen.flops.get(name, 0.0), origin=Origin.COUNTED)
        for name in _COMPUTE
        if chosen.flops.get(name)
    ]
    moved = of_one_step(design, chosen.bytes)
    lines += _collectives(chosen.calls, moved, Origin.COUNTED)
    step = Line(
        name=LineName.STEP, flops=sum(chosen.flops.values()), bytes=sum(moved.values()),
        origin=Origin.COUNTED, lines=tuple(lines),
    )  # fmt: skip
    told = {stage.rank: stage for stage in predicted.memory}
    workspace = workspace_bytes(design.cluster.groups[0].device, software=software_of(design.job, design.cluster))
    memory = tuple(_stage(count, told[count.rank], workspace=workspace) for count in ranks)
    return replace(
        predicted,
        step=step,
        memory=memory,
        error_band=(1.0, 1.0),
        doubts={},
        fit_probability=None,
        outlook=None,
        bottleneck="",
        software="",
        notes=_notes(design, ranks),
        detail={"shown rank": float(chosen.rank)},
    )


def of_one_step(design: Design, counted: Mapping[str, float]) -> dict[str, float]:
    """Bytes by `line|operation|axes` of a step, of which a round of learners that was `counted` whole is a share, and
    what they told each other once."""
    return {name: size / steps_between(design.plan, name) for name, size in counted.items()}


def _collectives(calls: Mapping[str, float], moved: Mapping[str, float], origin: Origin) -> list[Line]:
    """A line for every kind of collective, and under it one for each operation along its axes."""
    found: dict[str, list[Line]] = {}
    for name in sorted(moved):
        line, operation, axes = name.split("|")
        words = f"{operation.replace('_', '-')} along {axes.replace('+', ' x ')}"
        note = _number(int(calls[name]), "call") if name in calls else ""
        found.setdefault(line, []).append(Line(name=words, bytes=moved[name], origin=origin, note=note))
    return [
        Line(name=name, bytes=sum(line.bytes for line in lines), origin=origin, lines=tuple(lines))
        for name, lines in found.items()
    ]


def _stage(count: RankCount, told: StageMemory, *, workspace: float) -> StageMemory:
    """What was counted, and what no operator takes: the workspace of libraries, and what the prediction reserves for
    them and the device's context."""
    parts = {part.value: count.memory[part] for part in MemoryPart if count.memory.get(part)}
    beside = {MemoryPart.BUFFERS: workspace, MemoryPart.RESERVED: told.parts.get(MemoryPart.RESERVED, 0.0)}
    for part, size in beside.items():
        if size:
            parts[part.value] = parts.get(part.value, 0.0) + size
    return replace(told, parts=parts, host=count.host)


def _notes(design: Design, ranks: Sequence[RankCount]) -> tuple[str, ...]:
    notes = ["bytes of a collective are those of its whole tensor; FLOPs are of scores that are seen"]
    probed = sum(count.probed for count in ranks)
    if probed:
        notes.append(
            f"few layers and microbatches tell the whole of {probed:,} of {_number(len(ranks), 'pipeline rank')}"
        )
    if any(getattr(layer.transform, "experts", 0) for layer in design.model.layers):
        notes.append("every expert is given as many tokens as the others")
    cores = design.cluster.groups[0].device.kind is DeviceKind.CPU
    if design.job.data.document_mask and (cores or design.plan.context > 1):
        notes.append("every document is taken to fill its sequence")
    return tuple(notes)


def _number(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}{plural}"


def _nobody(_line: str) -> None:
    """Nobody listens."""
