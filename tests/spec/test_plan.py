from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.spec import codec
from meshwright.spec.placement_words import placement_words
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)


def plan() -> Plan:
    group = BlockGroup(start=0, stop=5, tensor=2, sequence_parallel=True, sharding=Sharding.PARAMETERS)
    return Plan(
        model="m",
        cluster="c",
        axes=(
            Axis(name=AxisName.PIPELINE, size=2),
            Axis(name=AxisName.SHARD, size=3),
            Axis(name=AxisName.TENSOR, size=2),
        ),
        stages=(
            Stage(rank=0, groups=(group,)),
            Stage(rank=1, groups=(replace(group, start=5, stop=10, recompute=Recompute.FULL),)),
        ),
        schedule=Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=4),
        sequence_length=128,
        microbatch=2,
    )


def test_sizes_follow_from_the_axes() -> None:
    value = plan()
    assert (value.pipeline, value.replicate, value.shard, value.tensor) == (2, 1, 3, 2)
    assert value.world_size == 12
    assert value.data == 3
    assert value.batch == 3 * 2 * 4
    assert value.batch_tokens == value.batch * 128
    assert value.stages_of(1) == (1,)
    assert (value.stages[1].start, value.stages[1].stop) == (5, 10)


def test_digest_names_the_plan_and_survives_a_round_trip() -> None:
    value = plan()
    again = codec.decode(Plan, json.loads(json.dumps(codec.encode(value))))
    assert again == value
    assert again.digest() == value.digest()
    assert replace(value, microbatch=3).digest() != value.digest()


def test_a_plan_in_chunks_names_its_schedule_without_a_pipeline() -> None:
    alone = replace(plan(), axes=(Axis(name=AxisName.REPLICATE, size=2),))
    kind = ScheduleKind.BREADTH_FIRST
    chunked = replace(alone, schedule=replace(alone.schedule, kind=kind, chunks=10))
    assert ", breadth-first, 10 chunks, " in chunked.describe()
    assert "breadth-first" not in replace(chunked, schedule=replace(chunked.schedule, chunks=1)).describe()


def test_a_plan_describes_itself_in_one_line() -> None:
    text = plan().describe()
    assert "12 devices: pipeline 2 x shard 3 x tensor 2" in text
    assert "zero3" in text
    assert "sequence parallel" in text
    assert "4 microbatches of 2" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        ((*range(16, 32), *range(16)), "16 to 31, 0 to 15"),
        (tuple(range(8, 16)), "8 to 15"),
        (tuple(reversed(range(16))), "15 down to 0"),
        ((*range(0, 16, 2), *range(1, 16, 2)), "0 to 14 by 2, 1 to 15 by 2"),
        ((1, 0, *range(2, 8)), "1 down to 0, 2 to 7"),
        ((0, 5, 1), "0, 5, 1"),
        ((3,), "3"),
        ((0, 9, 4, 20, 2, 30, 1), "0, 9, 4, 20, and 3 ranks elsewhere"),
    ],
)
def test_devices_are_told_in_the_order_of_the_ranks(placement: tuple[int, ...], told: str) -> None:
    assert placement_words(placement) == told


def test_a_plan_that_is_placed_backwards_says_so() -> None:
    backwards = replace(plan(), placement=tuple(reversed(range(12))))
    assert "pipeline 2 x shard 3 x tensor 2 on devices 11 down to 0 (" in backwards.describe()
    assert "on devices" not in replace(plan(), placement=tuple(range(12))).describe()
