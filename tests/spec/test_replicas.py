"""Replicas by themselves: their plans, their ranks, and what they read together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Sharding
from meshwright.spec.replicas import fewest_replicas, plan_of_replica, ranks_of_replica, share_of
from tests.support import designs, models
from tests.support.designs import Layout

SHARDS = Layout(replicate=3, shard=2, sharding=Sharding.PARAMETERS, batch=24)


@given(shard=st.sampled_from([1, 2, 4]), units=st.integers(1, 40), count=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_replicas_read_every_row_once_and_their_ranks_equally_many(shard: int, units: int, count: int) -> None:
    layout = Layout(shard=shard, sharding=Sharding.PARAMETERS, batch=units * shard)
    plan = designs.design(models.model(), layout).plan
    shares = [share_of(plan, index=index, count=count) for index in range(count)]
    assert [row for share in shares for row in share] == list(range(plan.batch))
    assert all(len(share) % shard == 0 for share in shares)
    sizes = [len(share) // shard for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_the_plan_of_a_replica_is_of_its_ranks_and_of_the_whole_batch() -> None:
    plan = designs.design(models.model(), SHARDS).plan
    own = plan_of_replica(plan)
    assert (own.world_size, own.replicate, own.shard) == (2, 1, 2)
    assert (own.batch, own.microbatch, own.batch_tokens) == (plan.batch, plan.microbatch, plan.batch_tokens)
    ranks = [ranks_of_replica(plan, replica) for replica in range(3)]
    assert ranks == [(0, 1), (2, 3), (4, 5)]


def test_so_many_replicas_have_as_many_ranks_as_are_needed() -> None:
    plan = designs.design(models.model(), SHARDS).plan
    assert [fewest_replicas(plan, ElasticSpec(min_ranks=fewest)) for fewest in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
