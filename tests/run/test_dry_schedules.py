"""Few microbatches of any schedule tell all of them, to the byte."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from meshwright.run.dry import pace
from meshwright.run.dry.jobs import jobs_of
from meshwright.run.dry.names import passes_of
from meshwright.run.dry.pace import Pace
from meshwright.schedule import planned
from meshwright.spec.plan import Design, Recompute, ScheduleKind, Sharding
from tests.run import dry_cases
from tests.run.dry_cases import case
from tests.run.test_dry_run import check_probes
from tests.support.designs import Layout

Kind = ScheduleKind
V_SHAPE = Layout(pipeline=2, chunks=2, kind=Kind.DUAL_PIPE_V, batch=12)
LOOP = Layout(pipeline=2, chunks=2, shard=2, kind=Kind.INTERLEAVED, sharding=Sharding.OPTIMIZER, batch=12)
QUICK = {
    # More microbatches than a device has room for what is received of all: none comes before its turn.
    "1f1b": case(Layout(pipeline=2, batch=112), layers=2),
    "gpipe": case(Layout(pipeline=2, kind=Kind.GPIPE, batch=6), layers=2),
    "interleaved": case(LOOP, layers=4),
    "breadth-first": case(Layout(pipeline=2, chunks=2, kind=Kind.BREADTH_FIRST, batch=6), layers=4),
    "zb-h1": case(Layout(pipeline=2, kind=Kind.ZERO_BUBBLE_H1, batch=11), layers=2),
    "zb-v": case(replace(V_SHAPE, kind=Kind.ZERO_BUBBLE_V), layers=4),
    "dualpipe-v": case(V_SHAPE, layers=4),
    "seq1f1b": case(Layout(pipeline=2, kind=Kind.SEQUENCE_1F1B, slices=2, batch=5), layers=2),
}
LOOPS = Layout(pipeline=4, shard=2, chunks=3, kind=Kind.INTERLEAVED, batch=32)
TALL_V = Layout(pipeline=4, shard=2, chunks=2, kind=Kind.ZERO_BUBBLE_V, batch=48)


def as_table(entry: Design) -> Design:
    """The same passes, told as a table."""
    plan = entry.plan
    program = planned.program(plan.schedule, pipeline=plan.pipeline)
    return replace(entry, plan=replace(plan, schedule=planned.of(program, chunks=plan.schedule.chunks)))


def test_few_microbatches_of_every_schedule_tell_all_of_them() -> None:
    check_probes(QUICK, ranks=[1])


@pytest.mark.slow
def test_few_microbatches_do_so_on_the_first_rank() -> None:
    check_probes(QUICK, ranks=[0])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", list(Sharding))
def test_loops_are_told_however_they_are_sharded(sharding: Sharding) -> None:
    """With replicas too, among which a step reduces once, and layers that are computed again."""
    shards = {"shard": 1} if sharding is Sharding.NONE else {}
    loops = replace(LOOPS, sharding=sharding, **shards)
    among = Layout(pipeline=2, chunks=2, replicate=2, kind=Kind.INTERLEAVED, sharding=sharding, batch=32, **shards)
    if sharding is not Sharding.NONE:
        among = replace(among, shard=2)
    check_probes(
        {
            "four ranks": case(loops, layers=12),
            "replicas": case(among, layers=4),
            "again": case(replace(among, recompute=Recompute.FULL), layers=8),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("kind", [Kind.ZERO_BUBBLE_V, Kind.DUAL_PIPE_V])
def test_v_shapes_are_told_however_they_are_sharded(kind: ScheduleKind, sharding: Sharding) -> None:
    shards = {"shard": 1} if sharding is Sharding.NONE else {}
    tall = replace(TALL_V, kind=kind, sharding=sharding, **shards)
    among = replace(tall, pipeline=2, replicate=2, batch=56)
    check_probes(
        {
            "four ranks": case(tall, layers=8),
            "replicas": case(among, layers=4),
            "again": case(replace(among, recompute=Recompute.FULL), layers=8),
            "table": as_table(case(among, layers=4)),
        }
    )


@pytest.mark.slow
def test_loops_of_experts_are_told() -> None:
    loops = replace(LOOPS, pipeline=2, chunks=2, sharding=Sharding.GRADIENTS, batch=24)
    v_shape = replace(V_SHAPE, shard=2, sharding=Sharding.GRADIENTS, batch=28)
    check_probes({"loops": case(loops, kind="mixture", layers=4), "v": case(v_shape, kind="mixture", layers=4)})


def test_many_microbatches_take_no_more_passes_than_few() -> None:
    """Of 6 stages a rank and 512 microbatches, of a V shape: what is traced is as it is of a tenth of them."""
    loops = Layout(pipeline=8, chunks=6, shard=2, kind=Kind.INTERLEAVED, sharding=Sharding.OPTIMIZER)
    v_shape = Layout(pipeline=8, chunks=2, kind=Kind.DUAL_PIPE_V)
    for layout, most in ((loops, 5), (v_shape, 20)):
        microbatches = 512
        entry = case(replace(layout, batch=microbatches * layout.shard), layers=48)
        for rank in (0, 3, 7):
            found = jobs_of(entry, rank=rank, whole=False)
            (job,) = found.jobs
            number = job.design.plan.schedule.microbatches
            assert number <= most
            assert found.microbatches == microbatches - number
            assert job.passes == passes_of(job.design.plan, rank=rank).total() <= 3 * number * layout.chunks


def test_no_two_lines_come_within_seconds_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told = Pace(said.append)
    for moment in range(4):
        now[0] += 0.6 * pace.SECONDS
        told.tell(lambda moment=moment: f"line {moment}")
    assert said == ["line 1", "line 3"]


def test_passes_of_a_trace_are_told_of() -> None:
    """Every one, to whom it concerns."""
    entry = case(Layout(pipeline=2, batch=12), layers=2)
    assert dry_cases.apart(dry_cases.passes_told, entry=entry, rank=1) == list(range(1, 25))
