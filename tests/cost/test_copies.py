"""What copies in memory leave when ranks are lost, and what they take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.cost import predict
from meshwright.cost.copies import Neighbours, alone, left, left_of
from meshwright.cost.holdings import Holding, holdings, trained
from meshwright.cost.learner_holdings import learner_holdings
from meshwright.cost.moved import least_bytes, unfit
from meshwright.cost.routes import routes
from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Design, ExpertGrid, Sharding
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import GradientSync, SyncKind, usual_rounds
from tests.cost.copy_bytes import copy_bytes
from tests.support import designs
from tests.support.designs import Layout
from tests.support.models import all_models

ZERO3 = Sharding.PARAMETERS
REPLICAS = Layout(replicate=4)
SHARDS = Layout(shard=4, sharding=ZERO3)
HYBRID = Layout(replicate=2, shard=2, sharding=ZERO3)
STAGES = Layout(pipeline=2, replicate=2)
SLICES = Layout(tensor=2, shard=2, sharding=ZERO3, sequence_parallel=True)
EXPERTS = Layout(tensor=2, shard=4, sharding=ZERO3, experts=ExpertGrid(expert=2, tensor=2))
TWO = Layout(pipeline=2)
SOLE = (SHARDS, SLICES, TWO)
LAYOUTS = (REPLICAS, SHARDS, HYBRID, STAGES, SLICES, EXPERTS, TWO)


def of(layout: Layout) -> Design:
    return designs.design(all_models()["mixture_full" if layout.experts else "tiny"], layout)


def without(ranks: int, *lost: int) -> dict[int, int]:
    """The others are processes 0, 1, ... in their order."""
    kept = [rank for rank in range(ranks) if rank not in lost]
    return {rank: place for place, rank in enumerate(kept)}


def of_one() -> dict[str, Holding]:
    return holdings(of(Layout()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whichever_rank_is_lost_all_of_the_state_is_left(layout: Layout) -> None:
    held, ranks, near = holdings(of(layout)), layout.ranks, Neighbours.of(of(layout))
    for lost in range(ranks):
        found = left(held, places=without(ranks, lost), neighbours=near)
        assert unfit(found, held) == ()
        kept = {process for one in found.values() for process in one.spares}
        assert kept <= {without(ranks, lost)[(lost + 1) % ranks]}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_neighbour_keeps_what_nobody_else_has_and_no_more(layout: Layout) -> None:
    held = holdings(of(layout))
    for rank in range(layout.ranks):
        for name, box in alone(held, rank, together=range(layout.ranks)).items():
            others = [other for process, other in held[name].parts.items() if process != rank]
            assert not any(other.meet(box) == box for other in others)
    sole = [name for name, one in held.items() if 0 in one.parts and one.shape]
    assert bool(set(sole) & alone(held, 0, together=range(layout.ranks)).keys()) is (
        layout in SOLE or layout is EXPERTS
    )


def test_what_a_lost_rank_and_its_neighbour_had_alone_is_lost() -> None:
    held, near = holdings(of(SHARDS)), Neighbours.of(of(SHARDS))
    found = left(held, places=without(4, 1, 2), neighbours=near)
    assert any("does not hold all of" in problem.what for problem in unfit(found, of_one()))
    others = left(held, places=without(4, 0, 2), neighbours=near)
    assert unfit(others, of_one()) == ()


@pytest.mark.parametrize("layout", [SHARDS, SLICES], ids=str)
def test_what_is_moved_from_copies_is_the_least(layout: Layout) -> None:
    entry = of(layout)
    found = left(holdings(entry), places=without(4, 2), neighbours=Neighbours.of(entry))
    target = holdings(of(Layout(shard=3, sharding=ZERO3, batch=12)))
    sent: dict[int, int] = {}
    for route in routes(found, target):
        for receiver in route.chain[1:]:
            sent[receiver] = sent.get(receiver, 0) + route.bytes
    assert sent == least_bytes(found, target)


def apart(layout: Layout, kind: SyncKind) -> Design:
    """Learners, of which some may be lost."""
    rounds = usual_rounds(kind, every=8, learners=layout.replicate)
    entry = designs.with_speed(of(layout))
    entry = replace(entry, plan=replace(entry.plan, gradients=GradientSync(kind=kind, rounds=rounds)))
    return replace(entry, job=replace(entry.job, elastic=ElasticSpec(min_ranks=2)))


@pytest.mark.parametrize("layout", [REPLICAS, HYBRID, STAGES], ids=str)
def test_without_a_learner_all_is_left_that_the_others_go_on_with(layout: Layout) -> None:
    entry = apart(layout, SyncKind.STREAMING)
    for lost in range(entry.plan.learners):
        places = without(layout.ranks, *entry.plan.ranks_of_learner(lost))
        fewer = apart(replace(layout, replicate=layout.replicate - 1, batch=12), SyncKind.STREAMING)
        kept = tuple(learner for learner in range(entry.plan.learners) if learner != lost)
        found = left_of(entry, places=places)
        assert unfit(found, learner_holdings(fewer, origins=kept)) == ()
        assert least_bytes(found, learner_holdings(fewer, origins=kept)) == {}, "each has all that it goes on with"
        assert unfit(found, learner_holdings(entry)) != ()


def test_a_learner_that_comes_is_sent_what_all_meet_in_and_an_optimizer() -> None:
    three, four = (apart(replace(REPLICAS, replicate=learners, batch=12), SyncKind.EAGER) for learners in (3, 4))
    found = left_of(three, places={0: 0, 1: 1, 2: 3})
    sent = least_bytes(found, learner_holdings(four, origins=(0, 1, None, 2)))
    parameters = sum(math.prod(one.shape) for one in trained(four).values())
    assert set(sent) == {2}
    assert sent[2] == pytest.approx(8 * 3 * parameters, rel=0.01), "anchor and two moments, in fp64"


@pytest.mark.parametrize("kind", [SyncKind.DILOCO, SyncKind.EAGER, SyncKind.STREAMING])
def test_the_memory_of_copies_of_learners_is_predicted(kind: SyncKind) -> None:
    entry = apart(HYBRID, kind)
    plain = replace(entry, job=replace(entry.job, elastic=ElasticSpec()))
    alone, beside = (max(stage.parts[MemoryPart.BUFFERS] for stage in predict(each).memory) for each in (plain, entry))
    sent = entry.plan.gradients.rounds.delay > 0
    each = 8.0 * sum(math.prod(one.shape) for one in trained(entry).values()) / 2
    assert beside - alone == pytest.approx(copy_bytes(entry).held + sent * each, rel=0.05)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout is not EXPERTS], ids=str)
def test_the_memory_of_copies_is_predicted(layout: Layout) -> None:
    entry = designs.with_speed(of(layout))
    elastic = replace(entry, job=replace(entry.job, elastic=ElasticSpec(min_ranks=1)))
    plain, copied = (
        max(stage.parts[MemoryPart.BUFFERS] for stage in predict(each).memory) for each in (entry, elastic)
    )
    assert copied - plain == pytest.approx(copy_bytes(entry).held, rel=0.01)


def over_nodes(layout: Layout, *, nodes: int) -> Design:
    made = of(layout)
    (group,) = made.cluster.groups
    group = replace(group, num_nodes=nodes, devices_per_node=layout.ranks // nodes)
    return replace(made, cluster=replace(made.cluster, groups=(group,)))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.ranks > 2], ids=str)
def test_whichever_host_is_lost_all_of_the_state_is_left(layout: Layout) -> None:
    made, ranks = over_nodes(layout, nodes=2), layout.ranks
    held, near, half = holdings(made), Neighbours.of(made), ranks // 2
    for lost in (range(half), range(half, ranks), (0,), (half,)):
        found = left(held, places=without(ranks, *lost), neighbours=near)
        assert unfit(found, held) == ()
    assert all(near.together[rank] != near.together[keeper] for rank, keeper in enumerate(near.keeper))


def test_a_host_with_most_of_the_ranks_keeps_some_of_its_own() -> None:
    made = over_nodes(SHARDS, nodes=1)
    (group,) = made.cluster.groups
    uneven = replace(made.cluster, groups=(replace(group, devices_per_node=3), replace(group, devices_per_node=1)))
    near = Neighbours.of(replace(made, cluster=uneven))
    assert near.together == (0, 0, 0, 1)
    assert near.keeper == (3, 0, 1, 2)
    assert sorted(near.kept_by(rank) for rank in range(4)) == [0, 1, 2, 3]


def test_the_memory_of_copies_over_hosts_is_predicted() -> None:
    """Replicas of one host are lost together, so that the other host keeps them too."""
    inside = Layout(shard=2, replicate=2, sharding=ZERO3)
    for layout, times in ((SHARDS, 2.0), (inside, 1.0)):
        entry = designs.with_speed(over_nodes(layout, nodes=2))
        found = copy_bytes(entry)
        assert found.kept == pytest.approx((times - 1.0) * found.own, rel=0.05)
        elastic = replace(entry, job=replace(entry.job, elastic=ElasticSpec(min_ranks=1)))
        plain, copied = (
            max(stage.parts[MemoryPart.BUFFERS] for stage in predict(each).memory) for each in (entry, elastic)
        )
        assert copied - plain == pytest.approx(found.held, rel=0.01)
