"""A legal and an illegal design for every rule of elastic runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.spec.cluster import DeviceKind
from meshwright.spec.job import ElasticSpec, Switch
from meshwright.spec.low_rank import Pufferfish
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from tests.search.compression_cases import Case
from tests.support import designs, models
from tests.support.designs import Layout


def elastic(*, fewest: int = 1, **changes: Any) -> Design:
    """Two replicas on processors."""
    made = designs.with_speed(designs.design(models.model(), Layout(replicate=2)))
    return replace(made, job=replace(made.job, elastic=ElasticSpec(min_ranks=fewest), **changes))


def on_devices(**fields: Any) -> Design:
    """The same on another node."""
    made = elastic()
    group = made.cluster.groups[0]
    kind = fields.pop("kind", DeviceKind.CPU)
    group = replace(group, device=replace(group.device, kind=kind), **fields)
    return replace(made, cluster=replace(made.cluster, groups=(group,)))


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
    "elastic-on-one-node": Case(
        elastic,
        lambda: on_devices(num_nodes=2, devices_per_node=1),
        "elastic runs over several nodes can be predicted and not trained yet",
    ),
    "elastic-on-processors": Case(
        elastic,
        lambda: on_devices(kind=DeviceKind.CUDA),
        "elastic runs on accelerators can be predicted and not trained yet",
    ),
    "elastic-of-whole-learners": Case(
        lambda: apart(fewest=2),
        lambda: apart(fewest=3),
        "learners of 2 ranks are lost whole, and 3 of 4 ranks are needed",
    ),
    "elastic-of-one-model": Case(
        elastic, lambda: elastic(low_rank=Pufferfish()), "whose matrices become thin factors on the way"
    ),
    "elastic-not-compiled": Case(
        elastic, lambda: elastic(compile=Switch.ON), "would compile them again whenever ranks change"
    ),
}
