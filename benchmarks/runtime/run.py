"""The runtime against the simulation: every schedule with stages that sleep, so that only waiting differs.

The bubble is the share of a step in which a rank does no pass; of some steps the one that others on the machine
disturbed least. What is simulated has no transfers and no overhead, as
nothing here is worth moving: all that the measured bubble has beyond it is the runtime's own.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sleeping import steps
from tests.support.pool import Pool

import record
from meshwright.cost.simulate import StageSeconds, makespan, simulate
from meshwright.schedule import NAMED, placement
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.schedule.planned import of, program
from meshwright.schedule.synthesize import Synthesis, synthesize
from meshwright.schedule.workload import Workload
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Plan, Schedule, ScheduleKind, Stage

PASS_SECONDS = 0.04
UNEVEN = 0.2
MORE = 2  # microbatches under way than 1F1B has, where a table is made
STEPS = 5
LIMIT = 0.03
RANKS = (4, 8)

Seconds = tuple[tuple[float, float, float], ...]


def planned(kind: ScheduleKind, *, pipeline: int) -> Plan:
    """Two microbatches a rank; one block is a stage."""
    chunks = 2 if kind in LOOPS | V_SHAPES else 1
    slices = 2 if kind is ScheduleKind.SEQUENCE_1F1B else 1
    places = placement(kind, pipeline=pipeline, chunks=chunks)
    return Plan(
        model="sleeping",
        cluster="here",
        axes=(Axis(name=AxisName.PIPELINE, size=pipeline),),
        stages=tuple(
            Stage(rank=rank, groups=(BlockGroup(start=index, stop=index + 1),)) for index, rank in enumerate(places)
        ),
        schedule=Schedule(kind=kind, microbatches=2 * pipeline, chunks=chunks, slices=slices),
        sequence_length=2,
        microbatch=1,
    )


def made(*, pipeline: int) -> tuple[Plan, Seconds, Synthesis]:
    """A table made for the stages, in memory for some more microbatches than 1F1B holds."""
    plan = planned(ScheduleKind.ONE_F_ONE_B, pipeline=pipeline)
    seconds = seconds_of(plan, seed=pipeline)
    forward, input, weight = zip(*seconds, strict=True)
    work = Workload(
        forward=forward,
        input=input,
        weight=weight,
        transfer=(0.0,) * pipeline,
        placement=tuple(range(pipeline)),
        microbatches=plan.schedule.microbatches,
        activation_bytes=(1.0,) * pipeline,
        limit_bytes=(float(pipeline + MORE),) * pipeline,
    )
    found = synthesize(work, tries=300, limit_seconds=float("inf"))
    return replace(plan, schedule=of(found.program, chunks=1)), seconds, found


def seconds_of(plan: Plan, *, seed: int) -> Seconds:
    """Forward, input's and weights' half of every stage: uneven, and as long a rank whatever its chunks."""
    chance = random.Random(seed)
    each = PASS_SECONDS / plan.schedule.chunks
    rows = [tuple(each * chance.uniform(1 - UNEVEN, 1 + UNEVEN) for _ in range(3)) for _ in plan.stages]
    return tuple((forward, input, weight) for forward, input, weight in rows)


def simulated(plan: Plan, seconds: Seconds) -> float:
    """Seconds of the step by the event simulation that prices are checked against."""
    table = program(plan.schedule, pipeline=plan.pipeline)
    stages = [
        StageSeconds(forward=forward, backward=input + weight, input_share=input / (input + weight))
        for forward, input, weight in seconds
    ]
    return makespan(simulate(table, stages=stages))


def measured(pool: Pool, plan: Plan, seconds: Seconds) -> list[float]:
    """Seconds from the first pass of any rank to the end of the last one, of each step."""
    ranks = pool.run(steps, plan, seconds, STEPS, ranks=plan.pipeline)
    return [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*ranks, strict=True)]


def bubble(plan: Plan, seconds: Seconds, step: float) -> float:
    """The mean share of `step` in which a rank does nothing."""
    busy = sum(sum(stage) for stage in seconds) * plan.schedule.microbatches
    return 1.0 - busy / (plan.pipeline * step)


def compared(pool: Pool, plan: Plan, seconds: Seconds) -> tuple[record.Row, dict[str, Any]]:
    """What is promised of a plan, and its raw numbers."""
    expected, found = simulated(plan, seconds), measured(pool, plan, seconds)
    step = min(found)
    should, does = bubble(plan, seconds, expected), bubble(plan, seconds, step)
    row = record.Row(
        name=f"{plan.describe().split(' (')[0]}, {plan.schedule.kind.value}: bubble {should:.1%} simulated",
        target=f"within {LIMIT:.0%}",
        measured=f"{does:.1%}, step {step / expected - 1.0:+.1%}",
        holds=abs(does - should) <= LIMIT,
    )
    print(row.name, row.measured, flush=True)
    entry = {"simulated_seconds": expected, "measured_seconds": found}
    return row, {**entry, "simulated_bubble": should, "measured_bubble": does}


def main() -> None:
    pool, rows, raw = Pool(), [], {}
    for ranks in RANKS:
        plans = [planned(kind, pipeline=ranks) for kind in NAMED]
        for plan in plans:
            row, entry = compared(pool, plan, seconds_of(plan, seed=ranks))
            rows.append(row)
            raw[f"{plan.schedule.kind.value}, {ranks} ranks"] = entry
        plan, seconds, found = made(pipeline=ranks)
        row, entry = compared(pool, plan, seconds)
        rows.append(row)
        raw[f"table, {ranks} ranks"] = {**entry, "classic_seconds": found.classic, "bound_seconds": found.bound}
    pool.close()
    record.finish("runtime", rows, raw)


if __name__ == "__main__":
    main()
