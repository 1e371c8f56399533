"""A plan that carries its table costs what the plan of that schedule costs, by its own counting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.schedule import NAMED, placement, planned
from meshwright.schedule.build import LOOPS, SLICED, V_SHAPES
from meshwright.spec.plan import Design, Schedule, ScheduleKind, Sharding
from tests.search import search_samples as samples
from tests.search.rule_designs import reranked

WHOLE = [kind for kind in NAMED if kind not in SLICED | {ScheduleKind.BREADTH_FIRST}]


def laid(kind: ScheduleKind, **fields: object) -> Design:
    chunks = 2 if kind in LOOPS | V_SHAPES else 1
    asked = samples.job(sequences=16)
    entry = Schedule(kind=kind, chunks=chunks, microbatches=8)
    made = samples.design(pipeline=4, shard=1, schedule=entry, asked=asked, **fields)
    return reranked(made, *placement(kind, pipeline=4, chunks=chunks))


def tabled(design: Design) -> Design:
    entry = design.plan.schedule
    table = planned.of(planned.table(entry, pipeline=design.plan.pipeline), chunks=entry.chunks)
    return replace(design, plan=replace(design.plan, schedule=table))


@pytest.mark.parametrize("kind", [*WHOLE, ScheduleKind.GPIPE])
def test_a_table_costs_what_its_schedule_costs(kind: ScheduleKind) -> None:
    classic = laid(kind)
    found, told = cost.predict(classic), cost.predict(tabled(classic))
    assert told.step_seconds == pytest.approx(found.step_seconds, rel=1e-12)
    for line in found.step.lines:
        assert told.share(line.name) == pytest.approx(found.share(line.name), rel=1e-9, abs=1e-15)
    for ours, theirs in zip(told.memory, found.memory, strict=True):
        assert dict(ours.parts) == pytest.approx(dict(theirs.parts), rel=1e-12)


@pytest.mark.parametrize("kind", [ScheduleKind.ZERO_BUBBLE_H2, ScheduleKind.DUAL_PIPE_V])
def test_collectives_of_a_table_are_those_of_its_schedule(kind: ScheduleKind) -> None:
    chunks = 2 if kind in V_SHAPES else 1
    entry = Schedule(kind=kind, chunks=chunks, microbatches=4)
    made = samples.design(tensor=1, pipeline=2, shard=4, schedule=entry, sharding=Sharding.PARAMETERS, microbatch=1)
    classic = reranked(made, *placement(kind, pipeline=2, chunks=chunks))
    for rank in range(2):
        assert cost.traffic(tabled(classic), rank=rank) == cost.traffic(classic, rank=rank)


def test_a_table_is_drawn_by_its_passes() -> None:
    classic = laid(ScheduleKind.ZERO_BUBBLE_H1)
    assert cost.timeline(tabled(classic)) == cost.timeline(classic)


def test_what_a_table_holds_is_counted() -> None:
    """A rank that goes one microbatch ahead holds two; one that goes forward with all of them first holds all."""
    one, all_first = (
        replace(laid(ScheduleKind.ONE_F_ONE_B), plan=replace(laid(ScheduleKind.ONE_F_ONE_B).plan, schedule=entry))
        for entry in (
            Schedule(kind=ScheduleKind.TABLE, microbatches=8, table=tuple(f"({s}F {s}B)*8" for s in range(4))),
            Schedule(kind=ScheduleKind.TABLE, microbatches=8, table=tuple(f"{s}F*8 {s}B*8" for s in range(4))),
        )
    )
    kept = [[held.parts["activations"] for held in cost.predict(each).memory] for each in (one, all_first)]
    classic = [held.parts["activations"] for held in cost.predict(laid(ScheduleKind.GPIPE)).memory]
    assert kept[1] == pytest.approx(classic)
    assert all(less < 0.3 * more for less, more in zip(*kept, strict=True))
