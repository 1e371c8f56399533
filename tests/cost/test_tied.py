"""The two copies of a tied table exchange their gradients: seconds beside the bytes that are counted."""

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.cost.traffic import traffic
from meshwright.spec.cluster import Link
from meshwright.spec.plan import Schedule, ScheduleKind, Sharding
from meshwright.spec.report import LineName
from tests.search import search_samples as samples

RATE = 1e7


def made(*, tied=True, shard=1, tensor=1, schedule=ScheduleKind.ONE_F_ONE_B, **changes):
    """Two stages on two nodes, with `shard` times `tensor` devices each."""
    nodes = samples.nodes(num_nodes=2, devices_per_node=shard * tensor)
    slow = replace(nodes, nic=Link(bandwidth=RATE, latency_seconds=0.0, efficiency=1.0), nics=1)
    found = samples.design(
        pipeline=2,
        tensor=tensor,
        shard=shard,
        sequence_parallel=False,
        sharding=Sharding.OPTIMIZER if shard > 1 else Sharding.NONE,
        schedule=Schedule(kind=schedule, microbatches=8, chunks=2 if schedule is ScheduleKind.DUAL_PIPE_V else 1),
        of=samples.model(vocab=4096, tied=tied),
        on=samples.cluster(slow),
        **changes,
    )
    stages = found.plan.stages
    turned = [replace(stage, rank=rank) for stage, rank in zip(stages, (0, 1, 1, 0), strict=False)]
    return replace(found, plan=replace(found.plan, stages=tuple(turned)))


def exchange(**changes):
    """Seconds of transfers between stages that the tied table adds."""
    tied, free = (cost.predict(made(tied=tied, **changes)) for tied in (True, False))
    return tied.step.find(LineName.TRANSFER).seconds - free.step.find(LineName.TRANSFER).seconds


def sent(**changes):
    """Bytes that the first rank sends more for it, as counted."""
    tied, free = (traffic(made(tied=tied, **changes), rank=0) for tied in (True, False))
    key = f"{LineName.TRANSFER.value}|send|pipeline"
    return tied.bytes[key] - free.bytes[key]


@pytest.mark.parametrize("changes", [{}, {"tensor": 2}, {"shard": 2}])
def test_both_ends_send_what_they_have_of_the_gradient(changes):
    ranks = changes.get("tensor", 1) * changes.get("shard", 1)  # of a node, which send at once over one adapter
    assert sent(**changes) > 0.0
    assert exchange(**changes) == pytest.approx(ranks * sent(**changes) / RATE, rel=0.02)


def test_stages_that_come_back_to_the_first_rank_send_nothing():
    assert exchange(schedule=ScheduleKind.DUAL_PIPE_V) == pytest.approx(0.0)


def test_a_rank_with_the_table_and_the_head_in_two_stages_holds_both():
    tied, free = (cost.predict(made(tied=tied, schedule=ScheduleKind.DUAL_PIPE_V)).memory[0] for tied in (True, False))
    for part in ("parameters", "gradients", "optimizer"):
        assert tied.parts[part] == free.parts[part]
