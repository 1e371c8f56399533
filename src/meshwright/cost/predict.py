"""One plan's Report, from the same arrays that the search ranks; and one step of it as spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost import fitting
from meshwright.cost.costs import Costs
from meshwright.cost.evaluate import evaluate
from meshwright.cost.goodput import outlook
from meshwright.cost.placed import as_placed
from meshwright.cost.quorum import paced
from meshwright.cost.stacks import software, software_name
from meshwright.cost.table import PlanTable
from meshwright.cost.uncertainty import REACH, doubts, spread, weights
from meshwright.spec.cluster import ClusterSpec, DeviceKind, NodeGroup, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Line, LineName, MemoryPart, Origin, Report, StageMemory
from meshwright.spec.units import counted, format_bytes, format_percent, format_seconds

_BYTES: dict[str, str] = {
    LineName.TENSOR: "tensor_bytes",
    LineName.OUTER: "outer_bytes",
}  # figures of what one device moves
_LONG_CONTEXT = 0.25  # of the model's FLOPs: where scores are more, what the mask hides matters


def predict(design: Design) -> Report:
    """What `design.plan` costs: lines that sum to the step, memory of every pipeline rank, the bottleneck in words.

    Raises ConfigError when the plan needs a figure that a device lacks, settings that differ between blocks, or a
    placement of which no cost is known.
    """
    return predict_all([design])[0]


def predict_all(designs: Sequence[Design]) -> list[Report]:
    """As `predict` of each; those of one model, cluster and job, their batches apart, that are placed alike are priced
    together."""
    jobs = [_job_of(design) for design in designs]
    columns = (
        _alike(design.plan.placement for design in designs),
        _alike(design.model for design in designs),
        _alike(design.cluster for design in designs),
        _alike(replace(job, batch_tokens=1) for job in jobs),
    )
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, key in enumerate(zip(*columns, strict=True)):
        alike.setdefault(key, []).append(place)
    reports: dict[int, Report] = {}
    for places in alike.values():
        model, unplaced = designs[places[0]].model, designs[places[0]].cluster
        table = PlanTable.stacked([PlanTable.from_plan(designs[place].plan) for place in places])
        cluster = as_placed(designs[places[0]].plan, unplaced)
        costs = evaluate(table, model=model, cluster=cluster, job=jobs[places[0]], every_rank=True)
        for row, place in enumerate(places):
            reports[place] = _report(
                designs[place], costs.row(row), table.take([row]), cluster=cluster, job=jobs[place]
            )
    return [reports[place] for place in range(len(designs))]


def _alike(values: Iterable[object]) -> list[int]:
    """Which of the distinct values each is."""
    known: list[object] = []
    found = []
    for value in values:
        place = next((place for place, other in enumerate(known) if other is value or other == value), len(known))
        known += [value] if place == len(known) else []
        found.append(place)
    return found


def _job_of(design: Design) -> JobSpec:
    """The job with the batch of the plan."""
    plan = design.plan
    return replace(design.job, sequence_length=plan.sequence_length, batch_tokens=plan.batch_tokens)


def _report(design: Design, costs: Costs, table: PlanTable, *, cluster: ClusterSpec, job: JobSpec) -> Report:
    """Of a design whose costs are those of one row."""
    plan, model, origin = design.plan, design.model, cluster.origin
    uneven = paced(costs, table, plan=plan, model=model, cluster=cluster, job=job)
    trained, met = 1.0, plan.gradients.words
    if uneven is not None:
        costs, trained, met = uneven.costs, uneven.paces.trained, uneven.words
    step = _step_line(costs, plan=plan, model=model, origin=origin, met=met)
    memory = _memory(costs, filled=_filled(plan, cluster, job))
    weight = weights(costs, table, model=model, cluster=cluster, job=job)
    reach = REACH * float(spread(weight, measured=cluster.step_error)[0])
    report = Report(
        plan=plan.digest(),
        step=step,
        memory=memory,
        tokens_per_step=round(trained * plan.read_tokens),
        devices=plan.world_size,
        model_flops=trained * _model_flops(design),
        peak_flops=_peak_flops(plan, cluster),
        error_band=(math.exp(-reach), math.exp(reach)),
        doubts={
            str(cause): float(each[0]) for cause, each in doubts(weight, measured=cluster.step_error).items() if each[0]
        },
        fit_probability=float(_fit_probability(costs)),
        outlook=outlook(table, step_seconds=step.seconds, model=model, cluster=cluster, job=job),
        total_tokens=design.job.total_tokens,
        price_per_hour=_price(plan, cluster),
        software=software_name(job, cluster),
        notes=_notes(design),
        detail=_detail(costs, plan=plan, cluster=cluster),
    )
    return replace(report, bottleneck=_bottleneck(report))


def _model_flops(design: Design) -> float:
    """FLOPs of a step without those of blocks that microbatches leave out."""
    plan, model = design.plan, design.model
    whole = model.flops_per_token(plan.sequence_length, frozen=plan.frozen_blocks)
    for index, stage in enumerate(plan.stages if plan.schedule.paths else ()):
        left_out = 1.0 - plan.passing(index)
        if left_out:
            rest = replace(model, layers=(*model.layers[: stage.start - 1], *model.layers[stage.stop - 1 :]))
            own = model.flops_per_token(plan.sequence_length) - rest.flops_per_token(plan.sequence_length)
            whole -= left_out * own
    return whole * plan.read_tokens


def _step_line(costs: Costs, *, plan: Plan, model: ModelSpec, origin: Origin, met: str) -> Line:
    """The step by its lines; on that of meeting is how ranks have `met`, in words."""
    lines = []
    flops = _pass_flops(costs, plan=plan, model=model)
    for name, values in costs.parts.items():
        seconds = float(values[0])
        children = _children(costs, name, seconds, origin=origin)
        lines.append(
            Line(
                name=name,
                seconds=seconds,
                flops=flops.get(name, 0.0),
                bytes=float(costs.figures.get(_BYTES.get(name, ""), np.zeros(1))[0]),
                origin=origin,
                note=_note(costs, name, seconds, plan=plan, met=met),
                lines=children,
            )
        )
    return Line(name=LineName.STEP, seconds=float(costs.step_seconds[0]), origin=origin, lines=tuple(lines))


def _children(costs: Costs, name: str, seconds: float, *, origin: Origin) -> tuple[Line, ...]:
    """Forward and backward by part of the model; what no part explains is the host's."""
    found = [
        Line(name=part, seconds=float(values[0]), origin=origin)
        for (line, part), values in costs.detail.items()
        if line == name and values[0] > 0.0
    ]
    if not found:
        return ()
    rest = seconds - sum(line.seconds for line in found)
    host = Line(name="host", seconds=rest, origin=origin, note="launches, framework and gradient accumulation")
    return (*found, host) if rest > 1e-9 * seconds else tuple(found)


def _pass_flops(costs: Costs, *, plan: Plan, model: ModelSpec) -> dict[str, float]:
    """FLOPs of the passes, of which forward has one product of the three of what is trained, and of the update."""
    length, whole = plan.sequence_length, float(costs.figures["flops"][0])
    trained = model.flops_per_token(length)
    counted = model.flops_per_token(length, frozen=plan.frozen_blocks) if plan.frozen_blocks else trained
    forward = whole * (trained / 3.0) / counted if counted else 0.0
    again, update = (float(costs.figures[name][0]) for name in ("flops_again", "flops_update"))
    return {
        LineName.FORWARD: forward,
        LineName.BACKWARD: whole - forward,
        LineName.RECOMPUTE: again,
        LineName.OPTIMIZER: update,
    }


def _note(costs: Costs, name: str, seconds: float, *, plan: Plan, met: str) -> str:
    if name in costs.total:
        hidden = float(costs.total[name][0]) - seconds
        told = [f"{format_seconds(hidden)} more are hidden behind work"] if hidden > 1e-9 else []
        shown = name == (LineName.GRADIENTS if plan.gradients.compression is not None else LineName.OUTER)
        return "; ".join([met, *told] if shown else told)
    if name == LineName.BUBBLE and plan.pipeline > 1:
        return f"pipeline rank {int(costs.busiest[0])} works most; the bubble is its idle time"
    return ""


def _filled(plan: Plan, cluster: ClusterSpec, job: JobSpec) -> float:
    """The least share of reserved memory that tensors fill, over the accelerators in use."""
    devices = [used.group.device for used in _used(plan, cluster)]
    shares = [device.usable_fraction for device in devices if device.kind is not DeviceKind.CPU]
    return min(*shares, software(software_name(job, cluster)).filled) if shares else 1.0


def _fit_probability(costs: Costs) -> float:
    found = fitting.probability(
        costs.memory, capacity=costs.capacity, valid=costs.valid, host=costs.host, host_room=costs.host_room
    )
    return float(found[0])


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _memory(costs: Costs, *, filled: float) -> tuple[StageMemory, ...]:
    return tuple(
        StageMemory(
            rank=int(costs.ranks[0, column]),
            parts={str(part): float(values[0, column]) for part, values in costs.memory.items()},
            capacity=float(costs.capacity[0, column]),
            filled=filled,
            host=float(costs.host[0, column]),
            host_capacity=_finite(costs.host_room[0, column]),
        )
        for column in np.flatnonzero(costs.valid[0])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    """Devices of one node group that a plan uses: the first of the cluster up to its world size."""

    group: NodeGroup
    devices: int


def _used(plan: Plan, cluster: ClusterSpec) -> tuple[_Used, ...]:
    left, found = plan.world_size, []
    for group in cluster.groups:
        taken = min(left, group.num_devices)
        if taken:
            found.append(_Used(group=group, devices=taken))
        left -= taken
    return tuple(found)


def _peak_flops(plan: Plan, cluster: ClusterSpec) -> float | None:
    """Peak of all devices in use at the plan's precision; None when one is not known."""
    total = 0.0
    for used in _used(plan, cluster):
        peak = _peak_of(used, plan.first_group.precision)
        if peak is None:
            return None
        total += peak
    return total


def _peak_of(used: _Used, precision: Precision) -> float | None:
    """Peak of the devices together, FLOP/s, None when it is not known; of ranks on a processor, that of its cores."""
    device = used.group.device
    peak = device.peak_flops.get(precision)
    if peak is None:
        return None
    count = float(used.devices)
    if device.kind is DeviceKind.CPU and used.group.cores is not None:
        nodes = -(-used.devices // used.group.devices_per_node)
        on_node = min(used.devices, used.group.devices_per_node)
        threads = max(1, used.group.cores // on_node)
        count = float(nodes * min(used.group.cores, on_node * threads))
    return peak * count


def _price(plan: Plan, cluster: ClusterSpec) -> float | None:
    """Dollars an hour of the devices in use; None when one has no price."""
    total = 0.0
    for used in _used(plan, cluster):
        if used.group.device.price_per_hour is None:
            return None
        total += used.devices * used.group.device.price_per_hour
    return total


def _notes(design: Design) -> tuple[str, ...]:
    plan, cluster = design.plan, design.cluster
    notes = []
    for used in _used(plan, cluster):
        group = used.group
        if group.device.kind is DeviceKind.CPU and group.cores is not None:
            on_node = min(used.devices, group.devices_per_node)
            if on_node > group.cores:
                notes.append(f"{on_node} ranks share {group.cores} cores of each {group.name} node")
    if plan.world_size < cluster.num_devices:
        idle = cluster.num_devices - plan.world_size
        notes.append(f"{counted(idle, 'device')} {'is' if idle == 1 else 'are'} not used")
    if beyond := design.model.beyond_positions(plan.sequence_length):
        notes.append(beyond)
    if plan.schedule.paths:
        notes.append(left_out(plan))
    if cluster.origin is Origin.ANALYTIC:
        notes.append("from data sheets and formulas; measure the machine to narrow the interval")
    scores = _score_share(design) if design.job.data.document_mask else 0.0
    if scores > _LONG_CONTEXT:
        notes.append(
            f"scores are {format_percent(scores)} of the model's FLOPs and are priced over whole sequences of "
            f"{plan.sequence_length:,} tokens: job.data.document_mask is on, and how long documents are is not known"
        )
    return tuple(notes)


def left_out(plan: Plan) -> str:
    """What microbatches leave out, and that it costs quality."""
    paths, stages = [[*map(int, path.split())] for path in plan.schedule.paths], len(plan.stages)
    least, most = (stages - size(map(len, paths)) for size in (max, min))
    number = f"{least}" if least == most else f"{least} to {most}"
    turned = sum(path != sorted(path) for path in paths)
    swapped = f", and {turned} of {len(paths)} pass stages out of turn" if turned else ""
    share = format_percent(plan.skipped_share)
    return (
        f"every microbatch leaves out {number} of {stages} stages, {share} of the layers on the mean{swapped}: what "
        "learns so is not the full model, and what that costs in quality has to be measured"
    )


def _score_share(design: Design) -> float:
    """Scores' share of the model's FLOPs at the plan's sequence length."""
    whole = design.model.flops_per_token(design.plan.sequence_length)
    scores = 3.0 * design.model.score_flops_per_token(design.plan.sequence_length)
    return scores / whole if whole else 0.0


def _detail(costs: Costs, *, plan: Plan, cluster: ClusterSpec) -> dict[str, float]:
    detail = {name: float(values[0]) for name, values in costs.figures.items()}
    detail["busiest_rank"] = float(costs.busiest[0])
    paced = _used(plan, cluster)[int(costs.paced[0])]
    peak = _peak_of(paced, plan.first_group.precision)
    if peak is not None:
        detail["busiest_peak_flops"] = peak / paced.devices
    for name, values in costs.total.items():
        detail[f"{name}, hidden included"] = float(values[0])
    return detail


_CAUSES = {
    LineName.FORWARD: "computing: forward",
    LineName.BACKWARD: "computing: backward",
    LineName.RECOMPUTE: "computing activations again",
    LineName.TENSOR: "collectives of tensor parallelism",
    LineName.CONTEXT: "keys and values on their way between context ranks",
    LineName.EXPERTS: "tokens on their way to their experts and back",
    LineName.HOST: "activations on their way to the host's memory and back",
    LineName.TRANSFER: "activations on their way between pipeline stages",
    LineName.BUBBLE: "pipeline ranks waiting for each other",
    LineName.GRADIENTS: "gradients on their way between data parallel ranks",
    LineName.PARAMETERS: "gathering sharded parameters",
    LineName.OUTER: "learners that meet",
    LineName.OPTIMIZER: "the optimizer's pass over its state",
    LineName.INPUT: "copying the batch",
    LineName.OTHER: "fixed overhead of a step",
}


def _bottleneck(report: Report) -> str:
    """What takes most of the step beside useful compute, and how near memory is to its end."""
    lines = sorted(report.step.lines, key=lambda line: -line.seconds)
    compute = report.share(LineName.FORWARD, LineName.BACKWARD)
    work = (LineName.FORWARD, LineName.BACKWARD)
    waste = next((line for line in lines if line.name not in work and line.seconds > 0.0), None)
    text = f"compute takes {format_percent(compute)} of the step"
    if waste is not None:
        share, cause = waste.seconds / report.step_seconds, _CAUSES[LineName(waste.name)]
        said = f"next is {cause} at {format_percent(share)}"
        text = f"{text}; {said}" if share <= compute else f"{cause} is {format_percent(share)} of the step; {text}"
    heaviest = max(report.memory, key=lambda stage: stage.total / stage.capacity)
    part = max(heaviest.parts, key=lambda name: heaviest.parts[name])
    text += f"; memory is {format_bytes(heaviest.total)} of {format_bytes(heaviest.capacity)} on rank {heaviest.rank}"
    return f"{text}, most of it {MemoryPart(part).value}"
