"""A legal and an illegal design for every rule of elastic runs under torchft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.spec.job import ElasticBackend, ElasticSpec, NonFinite, NonFiniteSpec, VerifySpec
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from tests.search.compression_cases import Case
from tests.search.elastic_cases import on_two_nodes
from tests.support import designs, models
from tests.support.designs import Layout

REPLICAS = Layout(replicate=2)
STAGES = Layout(replicate=2, pipeline=2)
SHARDS = Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS)


def kept(
    layout: Layout = REPLICAS, *, fewest: int = 1, lighthouse: str = "", mixture: bool = False, **changes: Any
) -> Design:
    """Replicas on processors that torchft keeps."""
    model = models.all_models()["mixture"] if mixture else models.model()
    made = designs.with_speed(designs.design(model, layout))
    spec = ElasticSpec(min_ranks=fewest, backend=ElasticBackend.TORCHFT, lighthouse=lighthouse)
    return replace(made, job=replace(made.job, elastic=spec, **changes))


def kept_by_us(*, lighthouse: str = "") -> Design:
    made = kept()
    spec = replace(made.job.elastic, backend=ElasticBackend.OWN, lighthouse=lighthouse)
    return replace(made, job=replace(made.job, elastic=spec))


def learning() -> Design:
    made = kept(synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,)))
    rounds = GradientSync(kind=SyncKind.DILOCO, rounds=Rounds(every=4))
    return replace(made, plan=replace(made.plan, gradients=rounds))


TORCHFT_CASES = {
    "torchft-is-elastic": Case(
        kept, lambda: kept(fewest=0), "torchft is chosen for a run that ends with the first lost rank"
    ),
    "torchft-lighthouse": Case(
        lambda: kept(lighthouse="http://one.example:29510"),
        lambda: kept(lighthouse="one.example:29510"),
        "'one.example:29510' is not where a lighthouse is",
    ),
    "torchft-of-replicas": Case(
        lambda: kept(SHARDS, fewest=2),
        lambda: kept(STAGES),
        "torchft keeps replicas of one rank or of shards, and the plan has pipeline 2",
    ),
    "torchft-meets-plainly": Case(
        kept, learning, "replicas meet by diloco, and torchft sums their whole gradients in every step"
    ),
    "torchft-of-dense-layers": Case(kept, lambda: kept(mixture=True), "routers balance their experts over all ranks"),
    "torchft-without-techniques": Case(
        kept, lambda: kept(techniques=("low_rank",)), "do not agree on what low_rank does on the way"
    ),
    "torchft-nothing-undone": Case(
        lambda: kept(non_finite=NonFiniteSpec(policy=NonFinite.SKIP)),
        lambda: kept(non_finite=NonFiniteSpec(policy=NonFinite.ROLL_BACK)),
        "replicas under torchft do not roll back as one",
    ),
    "torchft-on-one-node": Case(
        kept, lambda: on_two_nodes(kept()), "replicas under torchft on several nodes can be predicted"
    ),
}
MORE = (
    ("torchft-lighthouse", lambda: kept_by_us(lighthouse="http://one:1"), "a lighthouse is given and nobody"),
    ("torchft-of-replicas", lambda: kept(Layout(shard=2, sharding=Sharding.PARAMETERS)), "and the plan has one"),
    ("torchft-of-replicas", lambda: kept(SHARDS, fewest=3), "replicas of 2 ranks are lost whole, and 3 of 4"),
    ("torchft-nothing-undone", lambda: kept(verify=VerifySpec(every_steps=2)), "do not compare what they hold"),
)
