"""The best design for some of a job's ranks: its batch where that can be kept, its job as it was."""

from __future__ import annotations

from dataclasses import replace

from meshwright import cost
from meshwright.search import check, for_hosts, hosts_of, in_order, losses
from meshwright.search.decide import RUNTIME
from meshwright.spec.job import Constraints, ElasticSpec
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind, usual_rounds
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
        found = for_hosts(entry, ((0, ranks),))
        assert found is not None
        assert (found.plan.world_size, found.plan.batch) == (ranks, 12)
        assert found.cluster.num_devices == ranks
        assert (found.job, found.model) == (entry.job, entry.model)


def test_all_that_are_left_train_where_a_plan_may_use_fewer_devices() -> None:
    entry = elastic(12, devices="any")
    (group,) = entry.cluster.groups
    slow = replace(group, inside=replace(group.inside, bandwidth=1e3), nic=replace(group.nic, bandwidth=1e3))
    found = for_hosts(replace(entry, cluster=replace(entry.cluster, groups=(slow,))), ((0, 2),))
    assert found is not None
    assert found.plan.world_size == 2
    assert found.job == entry.job


def test_fewer_learners_are_what_they_were_and_share_the_batch() -> None:
    rounds = Rounds(every=6, delay=3, fragments=2, learning_rate=0.6, momentum=0.9, own_share=0.5)
    gradients = GradientSync(kind=SyncKind.STREAMING, rounds=rounds)
    layout = Layout(replicate=4, shard=2, sharding=Sharding.PARAMETERS, batch=32, microbatch=2)
    made = designs.with_speed(designs.design(models.model(), layout))
    fixed = Constraints(fix={"replicate": 4, "sync": "streaming"})
    allowed = SynchronizeSpec(kinds=(SyncKind.STREAMING,))
    job = replace(made.job, elastic=ElasticSpec(min_ranks=2), constraints=fixed, synchronize=allowed)
    entry = replace(made, job=job, plan=replace(made.plan, gradients=gradients))
    three, two, one = (for_hosts(entry, ((0, ranks),)) for ranks in (7, 4, 3))
    assert three is not None
    assert two is not None
    assert one is not None
    assert [found.plan.world_size for found in (three, two, one)] == [6, 4, 2]
    assert [found.plan.learners for found in (three, two, one)] == [3, 2, 1]
    assert [found.plan.batch for found in (three, two, one)] == [30, 32, 32]
    for found in (three, two, one):
        assert (found.plan.gradients, found.plan.shard, found.job) == (gradients, 2, entry.job)
        assert found.plan.microbatch <= 2
        assert found.cluster.num_devices == found.plan.world_size
    assert for_hosts(entry, ((0, 1),)) is None


def test_fewer_learners_have_the_outer_learning_rate_that_is_usual_for_them() -> None:
    rounds = usual_rounds(SyncKind.STREAMING, every=6, learners=4)
    made = elastic(12)
    made = replace(made, plan=replace(made.plan, gradients=GradientSync(kind=SyncKind.STREAMING, rounds=rounds)))
    made = replace(made, job=replace(made.job, synchronize=SynchronizeSpec(kinds=(SyncKind.STREAMING,))))
    found = for_hosts(made, ((0, 2),))
    assert found is not None
    assert found.plan.gradients.rounds == usual_rounds(SyncKind.STREAMING, every=6, learners=2)
    assert found.plan.gradients.rounds.learning_rate < rounds.learning_rate


def test_degrees_that_fewer_ranks_cannot_keep_are_left_out() -> None:
    found = for_hosts(elastic(12, fix={"replicate": 4, "recompute": "full"}), ((0, 3),))
    assert found is not None
    assert found.plan.world_size == 3
    assert found.plan.first_group.recompute.value == "full"


def test_a_batch_that_fewer_ranks_do_not_divide_is_kept_by_rows_that_are_empty() -> None:
    entry = elastic(8, forbid=("pipeline", "tensor", "context"))
    found = for_hosts(entry, ((0, 3),))
    assert found is not None
    assert (found.plan.data, found.plan.batch, found.plan.empty_rows, found.plan.sequences) == (3, 9, 1, 8)
    assert found.plan.describe().endswith(", 1 row empty")
    assert found.job == entry.job
    alone = replace(found, job=replace(found.job, elastic=ElasticSpec()))
    assert check(alone, scopes=RUNTIME) == ()
    assert cost.predict(found).tokens_per_step == entry.job.batch_tokens


def test_a_batch_whose_rows_routers_would_count_is_the_nearest() -> None:
    entry = elastic(8, forbid=("pipeline", "tensor", "context"))
    entry = replace(entry, model=models.all_models()["mixture"])
    found = for_hosts(entry, ((0, 3),))
    assert found is not None
    assert (found.plan.data, found.plan.batch, found.plan.empty_rows) == (3, 9, 0)
    assert found.job.batch_tokens == entry.job.batch_tokens


def over_nodes(made: Design, *, nodes: int) -> Design:
    (group,) = made.cluster.groups
    group = replace(group, num_nodes=nodes, devices_per_node=made.plan.world_size // nodes)
    return replace(made, cluster=replace(made.cluster, groups=(group,)))


def test_what_may_be_left_is_told_the_least_lost_first() -> None:
    hosts = hosts_of(over_nodes(elastic(12), nodes=2))
    assert hosts == ((0, 2), (0, 2))
    assert list(losses(hosts, fewest=2)) == [((0, 2),), ((0, 2), (0, 1)), ((0, 1), (0, 1))]
    assert list(losses(((0, 4),), fewest=2)) == [((0, 3),), ((0, 2),)]
    assert in_order([(1, 2), (0, 1), (0, 2)]) == ((0, 2), (0, 1), (1, 2))


def test_a_plan_lies_on_the_hosts_that_are_left() -> None:
    entry = over_nodes(elastic(12), nodes=2)
    found = for_hosts(entry, ((0, 2), (0, 1)))
    assert found is not None
    assert [(group.num_nodes, group.devices_per_node) for group in found.cluster.groups] == [(1, 2), (1, 1)]
    assert (found.plan.world_size, found.plan.batch) == (3, 12)
