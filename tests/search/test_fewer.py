"""The best design for some of a job's ranks: its batch where that can be kept, its job as it was."""

from __future__ import annotations

from dataclasses import replace

from meshwright.search import check, for_ranks
from meshwright.search.decide import RUNTIME
from meshwright.spec.job import Constraints, ElasticSpec
from meshwright.spec.plan import Design
from tests.support import designs, models
from tests.support.designs import Layout


def elastic(batch: int, **constraints: object) -> Design:
    made = designs.with_speed(designs.design(models.model(), Layout(replicate=4, batch=batch)))
    asked = Constraints(**constraints)  # type: ignore[arg-type]  # as a test writes them
    job = replace(made.job, elastic=ElasticSpec(min_ranks=2), constraints=asked)
    return replace(made, job=job)


def test_fewer_ranks_train_the_same_batch_where_a_plan_has_it() -> None:
    entry = elastic(12)
    for ranks in (3, 2):
        found = for_ranks(entry, ranks)
        assert found is not None
        assert (found.plan.world_size, found.plan.batch) == (ranks, 12)
        assert found.cluster.num_devices == ranks
        assert (found.job, found.model) == (entry.job, entry.model)


def test_degrees_that_fewer_ranks_cannot_keep_are_left_out() -> None:
    found = for_ranks(elastic(12, fix={"replicate": 4, "recompute": "full"}), 3)
    assert found is not None
    assert found.plan.world_size == 3
    assert found.plan.first_group.recompute.value == "full"


def test_a_batch_that_fewer_ranks_cannot_share_is_the_nearest() -> None:
    entry = elastic(8, forbid=("pipeline", "tensor", "context"))
    found = for_ranks(entry, 3)
    assert found is not None
    assert (found.plan.data, found.plan.batch) == (3, 9)
    assert found.job.batch_tokens == entry.job.batch_tokens
    alone = replace(found, job=replace(found.job, elastic=ElasticSpec()))
    assert check(alone, scopes=RUNTIME) == ()
