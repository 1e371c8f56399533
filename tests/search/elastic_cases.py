"""A legal and an illegal design for every rule of elastic runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.spec.cluster import DeviceKind
from meshwright.spec.job import ElasticSpec, Switch
from meshwright.spec.low_rank import Pufferfish
from meshwright.spec.plan import AxisName, Design, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from tests.search.compression_cases import Case
from tests.support import designs, models
from tests.support.designs import Layout


def elastic(*, fewest: int = 1, **changes: Any) -> Design:
    """Two replicas on processors."""
    made = designs.with_speed(designs.design(models.model(), Layout(replicate=2)))
    return replace(made, job=replace(made.job, elastic=ElasticSpec(min_ranks=fewest), **changes))


def on_accelerators() -> Design:
    made = elastic()
    group = made.cluster.groups[0]
    group = replace(group, device=replace(group.device, kind=DeviceKind.CUDA))
    return replace(made, cluster=replace(made.cluster, groups=(group,)))


def on_two_nodes(made: Design) -> Design:
    group = replace(made.cluster.groups[0], num_nodes=2, devices_per_node=made.plan.world_size // 2)
    return replace(made, cluster=replace(made.cluster, groups=(group,)))


def across(made: Design) -> Design:
    """The same with the ranks of a learner apart: shards are the outer axis."""
    order = [AxisName.PIPELINE, AxisName.SHARD, AxisName.REPLICATE, AxisName.TENSOR]
    axes = sorted(made.plan.axes, key=lambda axis: order.index(axis.name))
    return replace(made, plan=replace(made.plan, axes=tuple(axes)))


def apart(*, fewest: int) -> Design:
    """Two learners of two ranks."""
    rounds = GradientSync(kind=SyncKind.DILOCO, rounds=Rounds(every=4))
    layout = Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS)
    made = designs.with_speed(designs.design(models.model(), layout))
    allowed = SynchronizeSpec(kinds=(SyncKind.DILOCO,))
    job = replace(made.job, elastic=ElasticSpec(min_ranks=fewest), synchronize=allowed)
    return replace(made, job=job, plan=replace(made.plan, gradients=rounds))


ELASTIC_CASES = {
    "elastic-fewest-ranks": Case(
        elastic, lambda: elastic(fewest=2), "a run of 2 ranks that needs 2 of them can lose none"
    ),
    "elastic-on-processors": Case(
        elastic,
        on_accelerators,
        "elastic runs on accelerators can be predicted and not trained yet",
    ),
    "elastic-of-whole-learners": Case(
        lambda: apart(fewest=2),
        lambda: apart(fewest=3),
        "learners of 2 ranks are lost whole, and 3 of 4 ranks are needed",
    ),
    "elastic-learners-outlive-nodes": Case(
        lambda: on_two_nodes(apart(fewest=2)),
        lambda: on_two_nodes(across(apart(fewest=2))),
        "each of the 2 learners has ranks on node 0, and none is left whole without it",
    ),
    "elastic-of-one-model": Case(
        elastic, lambda: elastic(low_rank=Pufferfish()), "whose matrices become thin factors on the way"
    ),
    "elastic-not-compiled": Case(
        elastic, lambda: elastic(compile=Switch.ON), "would compile them again whenever ranks change"
    ),
}
