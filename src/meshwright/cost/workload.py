"""The pipeline of a plan as schedules are made to measure for it: predicted seconds and bytes of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost.evaluate import stage_seconds
from meshwright.cost.placed import as_placed
from meshwright.cost.predict import predict_all
from meshwright.cost.table import PlanTable
from meshwright.schedule import planned
from meshwright.schedule.program import BACKWARD, FORWARD, Ids, Program
from meshwright.schedule.rows import run
from meshwright.schedule.workload import Workload
from meshwright.spec.plan import Design, Plan


def workload(design: Design, *, splits: bool, limits: Sequence[float]) -> Workload | None:
    """What the ranks of a plan's pipeline do in a step, its backwards whole (weight halves of no seconds) or not.

    `limits` are bytes that ranks may hold in all. What a microbatch under way holds is what two hold beyond one, shared
    among the stages of a rank by their blocks. None where not even one keeps the limits, or there is no other. Raises
    ConfigError for a plan that `predict` refuses.
    """
    plan, cluster = design.plan, as_placed(design.plan, design.cluster)
    if plan.pipeline == 1 or plan.schedule.microbatches < 2:
        return None
    one, two = (
        replace(design, plan=replace(plan, schedule=planned.of(made, chunks=plan.schedule.chunks)))
        for made in (_under_way(plan, count, splits=splits) for count in (1, 2))
    )
    reports = predict_all([one, two])
    each = [max(more.total - less.total, 0.0) for less, more in zip(*(found.memory for found in reports), strict=True)]
    room = [limit - held.total for limit, held in zip(limits, reports[0].memory, strict=True)]
    if min(room) < 0.0:
        return None
    job = replace(design.job, sequence_length=plan.sequence_length, batch_tokens=plan.batch_tokens)
    seconds = stage_seconds(PlanTable.from_plan(one.plan), model=design.model, cluster=cluster, job=job)
    halves = [stage.input_share if splits else 1.0 for stage in seconds]
    held = np.bincount([stage.rank for stage in plan.stages], weights=[_blocks(plan, s) for s in range(len(seconds))])
    places = tuple(stage.rank for stage in plan.stages)
    return Workload(
        forward=tuple(stage.forward for stage in seconds),
        input=tuple(stage.backward * half for stage, half in zip(seconds, halves, strict=True)),
        weight=tuple(stage.backward * (1.0 - half) for stage, half in zip(seconds, halves, strict=True)),
        transfer=tuple(stage.transfer for stage in seconds),
        placement=places,
        microbatches=plan.schedule.microbatches,
        activation_bytes=tuple(each[rank] * _blocks(plan, stage) / held[rank] for stage, rank in enumerate(places)),
        limit_bytes=tuple((1.0 + 1e-9) * more + left for more, left in zip(each, room, strict=True)),
    )


def _blocks(plan: Plan, stage: int) -> float:
    return float(plan.stages[stage].stop - plan.stages[stage].start)


def _under_way(plan: Plan, count: int, *, splits: bool) -> Program:
    """Every microbatch in turn through all stages and back, so many under way at once."""
    microbatches = plan.schedule.microbatches
    steps = [(FORWARD, index) for index in range(count)]
    for index in range(microbatches):
        steps += [(BACKWARD, index)] + [(FORWARD, index + count)] * (index + count < microbatches)
    rows: list[Ids] = []
    for rank in range(plan.pipeline):
        stages = plan.stages_of(rank)
        passes = [run(work, stages if work == FORWARD else stages[::-1], index) for work, index in steps]
        rows.append(np.concatenate(passes))
    made = Program.of(rows, stages=len(plan.stages), microbatches=microbatches)
    return made.halved() if splits else made
