"""How often sharded parameters and gradients travel."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import SCHEDULES, SHARDINGS, PlanTable, evaluate
from meshwright.cost.kinds import accumulation_seconds
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.synchronize import turns
from meshwright.spec.plan import ScheduleKind, Sharding
from meshwright.spec.report import LineName
from tests.cost.cost_examples import JOB, even_layout, llama, selene


def breadth_first(*, chunks, microbatches, kind=ScheduleKind.BREADTH_FIRST):
    columns = {
        "pipeline": 4,
        "chunks": chunks,
        "shard": 8,
        "sharding": SHARDINGS.index(Sharding.PARAMETERS),
        "microbatches": microbatches,
        "schedule": SCHEDULES.index(kind),
    }
    return PlanTable.build(columns, layouts=[even_layout(layers=8, pipeline=4, chunks=chunks)])


def gathered(table):
    costs = evaluate(table, model=llama(width=1024, hidden=4096, heads=8, layers=8), cluster=selene(nodes=4), job=JOB)
    return float(costs.total[LineName.PARAMETERS][0])


def test_breadth_first_gathers_once_where_a_stage_is_one_layer():
    assert turns(breadth_first(chunks=2, microbatches=16)) == pytest.approx([16.0])
    few, many = (gathered(breadth_first(chunks=2, microbatches=count)) for count in (8, 32))
    assert many == pytest.approx(few)


def test_breadth_first_gathers_each_time_where_layers_of_a_stage_take_turns_in_memory():
    assert turns(breadth_first(chunks=1, microbatches=16)) == pytest.approx([1.0])
    few, many = (gathered(breadth_first(chunks=1, microbatches=count)) for count in (8, 32))
    assert many == pytest.approx(4.0 * few)


def test_other_schedules_gather_each_time():
    table = breadth_first(chunks=2, microbatches=8, kind=ScheduleKind.INTERLEAVED)
    assert turns(table) == pytest.approx([1.0])
    assert gathered(table) == pytest.approx(8.0 * gathered(breadth_first(chunks=2, microbatches=8)))


def test_a_head_or_an_embedding_beside_a_layer_is_no_second_layer():
    table = breadth_first(chunks=2, microbatches=4)
    uneven = replace(table.layouts[0], bounds=(0, 3, 4, 5, 6, 7, 8, 9, 10))
    assert np.array_equal(turns(replace(table, layouts=(uneven,))), [1.0])


def test_gradients_of_context_ranks_are_added_to_buckets_as_those_of_replicas_are():
    cluster = selene(nodes=4)

    def seconds(**columns):
        table = PlanTable.build({"microbatches": 4, **columns}, layouts=[even_layout(layers=8, pipeline=1)])
        device, software = cluster.groups[0].device, replace(SOFTWARE["megatron-core"], fused_accumulation=False)
        return float(accumulation_seconds(np.array([1e9]), table, device=device, software=software)[0])

    assert seconds(context=8) == seconds(replicate=8) > seconds(tensor=8)


def test_a_program_for_tpus_sums_over_slices_when_all_backwards_are_done():
    """However long the backward; other software hides it there."""
    model, cluster = llama(width=1024, hidden=4096, heads=8, layers=8), selene(nodes=4)
    columns = {"shard": 8, "replicate": 4, "sharding": SHARDINGS.index(Sharding.PARAMETERS), "microbatch": 64}
    table = PlanTable.build(columns, layouts=[even_layout(layers=8, pipeline=1)])

    def shown(software):
        job = replace(JOB, sequence_length=2048, batch_tokens=2048 * 64 * 32, software=software)
        costs = evaluate(table, model=model, cluster=cluster, job=job)
        return float(costs.parts[LineName.GRADIENTS][0])

    nic = cluster.groups[0].nic
    sent = 2.0 * 2.0 * model.parameters / 8.0 * 3.0 / 4.0
    assert shown("xla") - shown("xla-gpu") > sent / nic.bandwidth


def test_a_program_for_tpus_scatters_gradients_beside_nothing():
    """However long the backward; SparseCores, and other software, scatter them beside it."""
    model, cluster = llama(width=1024, hidden=4096, heads=8, layers=8), selene(nodes=4)
    columns = {"shard": 8, "sharding": SHARDINGS.index(Sharding.PARAMETERS), "microbatch": 64, "microbatches": 2}
    table = PlanTable.build(columns, layouts=[even_layout(layers=8, pipeline=1)])

    def seconds(software):
        job = replace(JOB, sequence_length=2048, batch_tokens=2048 * 64 * 16, software=software)
        costs = evaluate(table, model=model, cluster=cluster, job=job)
        return (float(each[LineName.GRADIENTS][0]) for each in (costs.parts, costs.total))

    shown, whole = seconds("xla")
    assert shown == pytest.approx(whole)
    hidden, as_much = seconds("xla-sparsecore")
    assert as_much == pytest.approx(whole)
    assert hidden < 0.5 * whole
