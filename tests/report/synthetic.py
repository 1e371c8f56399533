"""Run directories made up for tests: every file a run writes, with figures that are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from meshwright.cost.simulate import StageSeconds, simulate
from meshwright.schedule import Work, build
from meshwright.search import Decision, Rejection
from meshwright.search.candidate import Candidate
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, MatrixCurve, NodeGroup, Precision
from meshwright.spec.codec import encode
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Plan,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)
from meshwright.spec.report import Line, LineName, MemoryPart, Origin, Report, StageMemory
from meshwright.spec.span import Span
from tests.support.models import model

MIB = 2.0**20


def cluster() -> ClusterSpec:
    device = DeviceSpec(
        name="core",
        kind=DeviceKind.CPU,
        memory_bytes=4e9,
        memory_bandwidth=1e10,
        peak_flops={Precision.FP32: 5e10},
        matrix={Precision.FP32: MatrixCurve(fraction=0.8, half_m=8.0, half_n=8.0, half_k=8.0)},
    )
    link = Link(bandwidth=4e9, latency_seconds=2e-5)
    group = NodeGroup(name="node", device=device, num_nodes=1, devices_per_node=4, inside=link, nic=link, cores=4)
    return ClusterSpec(name="workstation", groups=(group,))


def design(*, pipeline: int = 2, shard: int = 2, microbatches: int = 8, name: str = "tiny") -> Design:
    spec = model(name)
    blocks = len(spec.blocks)
    edges = [round(index * blocks / pipeline) for index in range(pipeline + 1)]
    stages = tuple(
        Stage(
            rank=index,
            groups=(
                BlockGroup(
                    start=edges[index],
                    stop=edges[index + 1],
                    sharding=Sharding.PARAMETERS if shard > 1 else Sharding.NONE,
                    precision=Precision.FP32,
                ),
            ),
        )
        for index in range(pipeline)
    )
    plan = Plan(
        model=name,
        cluster="workstation",
        axes=(Axis(name=AxisName.PIPELINE, size=pipeline), Axis(name=AxisName.SHARD, size=shard)),
        stages=stages,
        schedule=Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=microbatches),
        sequence_length=64,
        microbatch=2,
    )
    job = JobSpec(
        name="novels",
        sequence_length=64,
        batch_tokens=plan.batch_tokens,
        total_tokens=plan.batch_tokens * 200,
        precision=Precision.FP32,
    )
    return Design(model=spec, cluster=cluster(), job=job, plan=plan)


def spans(design: Design, *, forward: float = 0.010, backward: float = 0.021, wobble: float = 0.0) -> tuple[Span, ...]:
    """One step of the plan's schedule on every pipeline rank, with gradient collectives and optimizer at the end."""
    plan = design.plan
    table = build(
        plan.schedule.kind,
        pipeline=plan.pipeline,
        chunks=plan.schedule.chunks,
        microbatches=plan.schedule.microbatches,
    )
    stages = [
        StageSeconds(forward=forward * (1 + wobble * index), backward=backward * (1 + wobble * index), transfer=0.0005)
        for index in range(len(plan.stages))
    ]
    found = []
    for event in simulate(table, stages=stages):
        action = event.action
        name = LineName.FORWARD if action.work is Work.FORWARD else LineName.BACKWARD
        found.append(
            Span(
                name=name,
                rank=event.rank,
                start=event.start,
                seconds=event.seconds,
                stage=action.stage,
                microbatch=action.microbatch,
            )
        )
    for rank in range(plan.pipeline):
        end = max(span.start + span.seconds for span in found if span.rank == rank)
        found.append(Span(name=LineName.GRADIENTS, rank=rank, start=end, seconds=0.018))
        found.append(Span(name=LineName.OPTIMIZER, rank=rank, start=end + 0.018, seconds=0.006))
    return tuple(found)


def report(seconds: dict[str, float], *, origin: Origin, memory: float = 100.0, pipeline: int = 2) -> Report:
    """A balanced report of the lines given; `memory` MiB of parameters and so on for every pipeline rank."""
    lines = tuple(Line(name=name, seconds=value, origin=origin) for name, value in seconds.items())
    parts = {
        MemoryPart.PARAMETERS: memory,
        MemoryPart.GRADIENTS: memory,
        MemoryPart.OPTIMIZER: 2 * memory,
        MemoryPart.ACTIVATIONS: 1.5 * memory,
        MemoryPart.LOGITS: 0.4 * memory,
        MemoryPart.RESERVED: 120.0,
    }
    stages = tuple(
        StageMemory(
            rank=rank,
            parts={part: MIB * value * (1.0 - 0.15 * rank) for part, value in parts.items()},
            capacity=4e9,
        )
        for rank in range(pipeline)
    )
    return Report(
        plan="0" * 12,
        step=Line(name=LineName.STEP, seconds=sum(seconds.values()), origin=origin, lines=lines),
        memory=stages,
        tokens_per_step=2048,
        devices=4,
        model_flops=2.4e9,
        peak_flops=None,
        error_band=(0.85, 1.2) if origin is not Origin.MEASURED else (1.0, 1.0),
        bottleneck="backward takes 52 % of the step" if origin is Origin.MEASURED else "backward compute",
        total_tokens=409_600,
    )


PREDICTED = {
    LineName.FORWARD: 0.080,
    LineName.BACKWARD: 0.168,
    LineName.TRANSFER: 0.004,
    LineName.BUBBLE: 0.031,
    LineName.GRADIENTS: 0.018,
    LineName.OPTIMIZER: 0.006,
    LineName.OTHER: 0.0,
}
MEASURED = {
    LineName.FORWARD: 0.083,
    LineName.BACKWARD: 0.172,
    LineName.TRANSFER: 0.007,
    LineName.BUBBLE: 0.036,
    LineName.GRADIENTS: 0.039,
    LineName.OPTIMIZER: 0.005,
    LineName.INPUT: 0.001,
    LineName.OTHER: 0.004,
}


def decision(chosen: Design) -> Decision:
    other = replace(chosen.plan, schedule=replace(chosen.plan.schedule, kind=ScheduleKind.GPIPE))
    first = Candidate(
        plan=chosen.plan,
        step_seconds=0.307,
        error_band=(0.8, 1.2),
        tokens_per_second=6670.0,
        mfu=None,
        peak_bytes=4.1e8,
        capacity_bytes=4e9,
        bubble_share=0.1,
        communication_share=0.07,
        total_seconds=61.0,
        total_cost=None,
    )
    return Decision(
        design=chosen,
        report=report(PREDICTED, origin=Origin.ANALYTIC, pipeline=chosen.plan.pipeline),
        ranked=(first, replace(first, plan=other, step_seconds=0.342)),
        rejected=(Rejection(rule="tensor divides heads", count=14, example="tensor 3 does not divide 4 heads"),),
        why=("It is 11 % faster than the next plan: gpipe keeps more activations.",),
        considered=4321,
        priced=4321,
        fitting=310,
        seconds=0.21,
    )


def metrics(*, steps: int, slower: float = 1.0) -> list[dict[str, float | int | None]]:
    rows: list[dict[str, float | int | None]] = []
    for step in range(1, steps + 1):
        noise = math.sin(step * 12.9898) * 0.5
        seconds = 0.347 * slower * (1.0 + 0.05 * noise) * (2.2 if step == 1 else 1.0)
        rows.append(
            {
                "step": step,
                "tokens": step * 2048,
                "loss": 3.1 + 5.1 * math.exp(-step / (40 * slower)) + 0.12 * noise,
                "grad_norm": 1.0 + 0.1 * noise,
                "learning_rate": 3e-4,
                "seconds": seconds,
                "tokens_per_second": 2048 / seconds,
                "mfu": None,
                "memory_bytes": 6.2e8,
                "of_prediction": 0.307 / seconds,
            }
        )
        if step % 40 == 0:
            loss = 3.2 + 5.0 * math.exp(-step / (40 * slower))
            tokens = step * 2048
            rows.append(
                {"step": step, "tokens": tokens, "validation_loss": loss, "bits_per_byte": loss / 0.6931 / 3.46}
            )
    return rows


def write_run(folder: Path, *, steps: int = 200, slower: float = 1.0, chosen: Design | None = None) -> Path:
    """A whole run directory."""
    chosen = chosen or design()
    pipeline = chosen.plan.pipeline
    folder.mkdir(parents=True)
    predicted = report(PREDICTED, origin=Origin.ANALYTIC, pipeline=pipeline)
    measured = report(
        {name: value * slower for name, value in MEASURED.items()},
        origin=Origin.MEASURED,
        memory=104.0,
        pipeline=pipeline,
    )
    (folder / "design.json").write_text(chosen.to_json())
    (folder / "predicted.json").write_text(json.dumps(encode(predicted)))
    (folder / "measured.json").write_text(json.dumps(encode(measured)))
    (folder / "decision.json").write_text(json.dumps(encode(decision(chosen))))
    environment = {"command": ["meshwright", "train"], "host": "workstation", "versions": {"torch": "2.13.0"}}
    (folder / "environment.json").write_text(json.dumps({**environment, "memory_bytes": 8 * 2**30}))
    rows = metrics(steps=steps, slower=slower)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sample.txt").write_text("It was the best of <mills>,\nthe river & its wheel.")
    (folder / "spans").mkdir()
    step_spans = spans(chosen, wobble=0.06 * slower)
    for worker in range(chosen.plan.world_size):
        rank = worker // chosen.plan.shard
        lines = [
            json.dumps(encode(replace(span, rank=worker, step=step, start=1.7e9 + step + span.start)))
            for step in (5, 6, 7)
            for span in step_spans
            if span.rank == rank
        ]
        (folder / "spans" / f"rank-{worker:05d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
