from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import PRECISIONS, SHARDINGS, Layout, PlanTable, evaluate
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Recompute, ScheduleKind, Sharding, Stage
from meshwright.spec.report import LineName
from tests.cost.cost_examples import design, even_layout, llama, selene
from tests.support.designs import sharded


@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 4]),
    replicate=st.integers(1, 3),
    shard=st.integers(1, 3),
    sharding=st.sampled_from(list(Sharding)),
    recompute=st.sampled_from(list(Recompute)),
    kind=st.sampled_from([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B]),
    precision=st.sampled_from([Precision.BF16, Precision.FP32]),
    sequence_parallel=st.booleans(),
)
def test_a_plan_and_its_row_are_the_same(**options):
    plan = design(llama(), selene(nodes=4), microbatch=2, microbatches=3, **options).plan
    table = PlanTable.from_plan(plan)
    again = table.to_plan(0, model=plan.model, cluster=plan.cluster, sequence_length=plan.sequence_length)
    assert again == plan
    assert int(table.world[0]) == plan.world_size
    assert int(table.data[0]) == plan.data


def test_columns_left_out_have_their_defaults():
    table = PlanTable.build({"tensor": [1, 2], "shard": 4}, layouts=[Layout((0, 6), (0,))])
    assert len(table) == 2
    assert table.shard.tolist() == [4, 4]
    assert SHARDINGS[int(table.sharding[0])] is Sharding.NONE
    assert PRECISIONS[int(table.precision[1])] is Precision.BF16
    assert table.take(np.array([False, True])).tensor.tolist() == [2]


def halved(**second):
    """A plan of one stage whose second half of blocks has settings of its own."""
    plan = design(llama(layers=4), selene(nodes=1), layout=even_layout(layers=4, pipeline=1)).plan
    halves = (BlockGroup(start=0, stop=3), BlockGroup(start=3, stop=6, **second))
    return replace(plan, stages=(Stage(rank=0, groups=halves),))


def test_groups_that_differ_are_refused_in_words():
    with pytest.raises(ConfigError, match="differ"):
        PlanTable.from_plan(halved(precision=Precision.FP32))


def test_blocks_may_differ_in_what_they_compute_again():
    plan = halved(recompute=Recompute.FULL)
    table = PlanTable.from_plan(plan)
    assert table.to_plan(0, model=plan.model, cluster=plan.cluster, sequence_length=plan.sequence_length) == plan

    made = design(llama(layers=4), selene(nodes=1), layout=even_layout(layers=4, pipeline=1))

    def costs(of):
        return evaluate(PlanTable.from_plan(of), model=made.model, cluster=made.cluster, job=made.job)

    none, half, full = costs(halved()), costs(plan), costs(recomputed(halved()))
    assert half.parts["recompute"][0] == pytest.approx(full.parts["recompute"][0] / 2)
    assert none.memory_bytes[0] > half.memory_bytes[0] > full.memory_bytes[0]


def test_blocks_may_differ_in_how_they_are_sharded():
    made = design(llama(layers=4), selene(nodes=1), layout=even_layout(layers=4, pipeline=1))
    plan = replace(made.plan, axes=(Axis(name=AxisName.SHARD, size=8),))
    plan = replace(plan, schedule=replace(plan.schedule, microbatches=4))

    def sharded_as(word):
        return sharded(replace(made, plan=plan), word).plan

    def costs(word):
        return evaluate(PlanTable.from_plan(sharded_as(word)), model=made.model, cluster=made.cluster, job=made.job)

    mixed = sharded_as("331113")
    table = PlanTable.from_plan(mixed)
    again = table.to_plan(0, model=mixed.model, cluster=mixed.cluster, sequence_length=mixed.sequence_length)
    assert PlanTable.from_plan(again).layouts == table.layouts
    first, unlike, third = (costs(word) for word in ("111111", "331113", "333333"))
    assert third.memory_bytes[0] < unlike.memory_bytes[0] < first.memory_bytes[0]
    for line in (LineName.PARAMETERS, LineName.GRADIENTS):
        assert first.total[line][0] < unlike.total[line][0] < third.total[line][0]


def recomputed(plan):
    groups = tuple(replace(group, recompute=Recompute.FULL) for group in plan.stages[0].groups)
    return replace(plan, stages=(Stage(rank=0, groups=groups),))
