"""The space is what the rules say: every row is legal, and every legal uniform plan is a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from meshwright.cost import Layout, PlanTable
from meshwright.cost.table import EXCHANGES, RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.schedule import NAMED
from meshwright.search import Scope, Space, check, enumerate_plans
from meshwright.search.balance import Balancer
from meshwright.search.rules import divisors
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.exchange import TokenLayout
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, ScheduleKind
from tests.search import search_samples as samples
from tests.support.models import with_prefix

EMITTED = frozenset({Scope.PLAN, Scope.SEARCH})


def space(model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Space:
    balancer = Balancer([1.0] * len(model.blocks))
    return enumerate_plans(model, cluster, job, boundaries=lambda _, ranks, _devices: balancer.bounds(len(ranks)))


def designs(found: Space, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> list[Design]:
    table = found.table
    plans = (
        table.to_plan(row, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length)
        for row in range(len(table))
    )
    return [Design(model=model, cluster=cluster, job=job, plan=plan) for plan in plans]


def by_the_rules(model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> set[str]:
    """Every uniform plan that no plan rule refuses, by trying them all. One pipeline rank is 1f1b."""
    balancer = Balancer([1.0] * len(model.blocks))
    degrees = range(1, cluster.num_devices + 1)
    legal = set()
    for tensor, pipeline, replicate, shard, context in product(degrees, repeat=5):
        data = replicate * shard
        world = tensor * pipeline * data * context
        if world > cluster.num_devices or job.batch_sequences % data:
            continue
        if world < cluster.num_devices and job.constraints.devices == "all":
            continue
        local = job.batch_sequences // data
        chunked = [(kind, 1) for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)]
        chunked += [(ScheduleKind.INTERLEAVED, chunks) for chunks in range(2, len(model.blocks) + 1)]
        for microbatch, (kind, chunks) in product(divisors(local), chunked):
            if pipeline * chunks > len(model.blocks) or (pipeline == 1 and kind is ScheduleKind.GPIPE):
                continue
            layout = Layout(
                bounds=balancer.bounds(pipeline * chunks),
                ranks=tuple(stage % pipeline for stage in range(pipeline * chunks)),
            )
            exchanges = [(inner, kind) for inner in divisors(context) for kind in range(len(EXCHANGES))]
            exchanges = [(inner, kind) for inner, kind in exchanges if inner < context or kind == 0]
            choices = product(range(len(SHARDINGS)), range(len(RECOMPUTES)), (0, 1), exchanges)
            for sharding, recompute, sequence_parallel, (inner, exchange) in choices:
                columns = {
                    "context": context,
                    "inner": inner,
                    "exchange": exchange,
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "replicate": replicate,
                    "shard": shard,
                    "chunks": chunks,
                    "schedule": SCHEDULES.index(kind),
                    "microbatch": microbatch,
                    "microbatches": local // microbatch,
                    "sharding": sharding,
                    "recompute": recompute,
                    "sequence_parallel": sequence_parallel,
                }
                table = PlanTable.build(columns, layouts=(layout,))
                plan = table.to_plan(0, model=model.name, cluster=cluster.name, sequence_length=job.sequence_length)
                if not check(Design(model=model, cluster=cluster, job=job, plan=plan), scopes=EMITTED):
                    legal.add(plan.digest())
    return legal


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        ("all", 4),
        *(pytest.param(devices, count, marks=pytest.mark.slow) for devices, count in (("any", 4), ("all", 6))),
    ],
)
def test_the_space_is_every_plan_that_the_rules_allow(devices: str, count: int) -> None:
    model = samples.model(layers=3)
    cluster = samples.cluster(samples.nodes(devices_per_node=count))
    job = samples.job(sequences=12, constraints=Constraints(devices=devices, forbid=("chunks=5",)))
    found = designs(space(model, cluster, job), model, cluster, job)
    digests = [design.plan.digest() for design in found]
    assert len(digests) == len(set(digests)) > 100
    assert all(not check(design, scopes=EMITTED) for design in found)
    classic = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED)
    digests = [design.plan.digest() for design in found if design.plan.schedule.kind in classic]
    assert {design.plan.schedule.kind for design in found} == set(NAMED)
    expected = by_the_rules(model, cluster, job)
    assert set(digests) <= expected
    missing = expected - set(digests)
    assert not missing, f"{len(missing)} of {len(expected)} legal plans are not rows"


def test_chunk_counts_with_the_same_largest_stage_are_one() -> None:
    model = samples.model(layers=10)
    job = samples.job(constraints=Constraints(fix={"pipeline": 2, "schedule": "interleaved"}))
    table = space(model, samples.cluster(), job).table
    assert set(table.chunks.tolist()) == {2, 3, 6}, "largest stages of 3, 2 and 1 blocks"
    job = samples.job(constraints=Constraints(fix={"pipeline": 2, "chunks": 5}))
    assert set(space(model, samples.cluster(), job).table.chunks.tolist()) == {5}


def test_prompts_that_see_all_of_themselves_are_neither_sliced_nor_in_a_zigzag() -> None:
    model, cluster = with_prefix(samples.model(layers=3)), samples.cluster(samples.nodes(devices_per_node=4))
    job = samples.job(sequences=12, constraints=Constraints(forbid=("recompute=full", "zero=zero2")))
    found = designs(space(model, cluster, job), model, cluster, job)
    assert found
    assert all(not check(design, scopes=EMITTED) for design in found)
    divided = [design.plan.exchange.layout for design in found if design.plan.context > 1]
    assert set(divided) == {TokenLayout.BALANCED}
    refused = {rejection.rule for rejection in space(model, cluster, job).rejected}
    assert "prefix-in-one-slice" in refused


def test_every_degree_is_tried_not_only_powers_of_two() -> None:
    model = samples.model(layers=10, layer=samples.dense_layer(heads=12, kv_heads=6), vocab=600)
    cluster = samples.cluster(samples.nodes(num_nodes=3))
    table = space(model, cluster, samples.job(sequences=48)).table
    assert {3, 6} <= set(table.pipeline.tolist())
    assert {3, 6} <= set(table.tensor.tolist())
    assert {3, 12} <= set(table.shard.tolist())
    assert np.all(table.world == 24)


def test_what_each_rule_refused_is_counted_with_an_example() -> None:
    job = samples.job(constraints=Constraints(forbid=("zero=zero2",)))
    three = samples.model(layer=samples.dense_layer(heads=24, kv_heads=3))
    found = {rejection.rule: rejection for rejection in space(three, samples.cluster(), job).rejected}
    assert found["tensor-shares-kv-heads"].count == 3
    assert found["tensor-shares-kv-heads"].example == "tensor 2"
    assert found["microbatches-fill"].count > 0
    assert "pipeline" in found["microbatches-fill"].example
    assert "zero2" in found["keeps-constraints"].example


def test_one_microbatch_on_one_pipeline_rank_has_one_schedule() -> None:
    job = samples.job(sequences=8, constraints=Constraints(fix={"pipeline": 1}))
    table = space(samples.model(), samples.cluster(), job).table
    kinds = [SCHEDULES[kind] for kind in table.schedule[table.microbatches == 1]]
    assert set(kinds) == {ScheduleKind.ONE_F_ONE_B}
    assert SCHEDULES.index(ScheduleKind.BREADTH_FIRST) in table.schedule[table.microbatches > 1]


def test_constraints_are_kept() -> None:
    constraints = Constraints(fix={"tensor": 2, "zero": 3, "microbatch": "2"}, forbid=("pipeline", "recompute=full"))
    table = space(samples.model(), samples.cluster(), samples.job(constraints=constraints)).table
    assert len(table)
    assert set(table.tensor.tolist()) == {2}
    assert set(table.pipeline.tolist()) == {1}
    assert set(table.sharding.tolist()) == {3}
    assert set(table.microbatch.tolist()) == {2}
    assert set(table.recompute.tolist()) == {0, 1}


def test_a_job_that_no_plan_can_mend_is_refused_with_every_reason() -> None:
    job = replace(samples.job(), batch_tokens=1000, precision=Precision.FP8)
    with pytest.raises(ConfigError) as raised:
        space(samples.model(positions=64), samples.cluster(), job)
    text = str(raised.value)
    assert "1,000 tokens are not whole sequences of 128" in text
    assert "choose 1024" in text
    assert "128 is more than the 64 positions" in text
    assert "device has no fp8 arithmetic" in text
    with pytest.raises(ConfigError, match="bf16 is forbidden by job"):
        space(samples.model(), samples.cluster(), samples.job(constraints=Constraints(forbid=("precision=bf16",))))


def test_nothing_legal_is_an_empty_table_with_reasons() -> None:
    job = samples.job(constraints=Constraints(fix={"tensor": 3}))
    found = space(samples.model(), samples.cluster(), job)
    assert len(found.table) == 0
    assert found.rejected
