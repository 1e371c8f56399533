import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import PRECISIONS, SHARDINGS, Layout, PlanTable
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import BlockGroup, Recompute, ScheduleKind, Sharding, Stage
from tests.cost.cost_examples import design, even_layout, llama, selene


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


def test_groups_that_differ_are_refused_in_words():
    plan = design(llama(layers=4), selene(nodes=1), layout=even_layout(layers=4, pipeline=1)).plan
    halves = (
        BlockGroup(start=0, stop=3, recompute=Recompute.FULL),
        BlockGroup(start=3, stop=6, recompute=Recompute.NONE),
    )
    uneven = plan.__class__(
        model=plan.model,
        cluster=plan.cluster,
        axes=plan.axes,
        stages=(Stage(rank=0, groups=halves),),
        schedule=plan.schedule,
        sequence_length=plan.sequence_length,
        microbatch=1,
    )
    with pytest.raises(ConfigError, match="differ"):
        PlanTable.from_plan(uneven)
