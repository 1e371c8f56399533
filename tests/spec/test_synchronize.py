"""Learners of a plan: which ranks they are, when what they learnt sets out, and the outer step that is recommended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.plan import AxisName
from meshwright.spec.synchronize import (
    GradientSync,
    Rounds,
    SyncKind,
    as_usual,
    dealt,
    outer_learning_rate,
    usual_rounds,
)
from tests.support import models
from tests.support.designs import Layout, plan

GRID = replace(
    plan(models.model(), Layout(pipeline=2, replicate=3, shard=2)), gradients=GradientSync(kind=SyncKind.DILOCO)
)


def test_learners_share_all_ranks_and_are_plans_of_their_own() -> None:
    members = [GRID.ranks_of_learner(learner) for learner in range(GRID.learners)]
    assert sorted(rank for ranks in members for rank in ranks) == list(range(GRID.world_size))
    assert members[1] == (2, 3, 8, 9), "the second replica of either stage"
    own = GRID.of_learner()
    assert (own.learners, own.world_size, own.shard, own.pipeline) == (1, 4, 2, 2)
    assert own.of_learner() is own
    assert [axis.name for axis in own.axes] == [axis.name for axis in GRID.axes]


def test_without_learners_all_ranks_are_one() -> None:
    one = replace(GRID, gradients=GradientSync())
    assert one.learners == 1
    assert one.ranks_of_learner(0) == tuple(range(12))
    assert one.size(AxisName.REPLICATE) == 3


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (7, 3), (24, 4), (5, 5), (500, 7)])
def test_fragments_set_out_one_after_another_and_the_last_at_the_end(every: int, fragments: int) -> None:
    rounds = Rounds(every=every, fragments=fragments)
    starts = [rounds.starts(fragment) for fragment in range(fragments)]
    assert starts == sorted(set(starts))
    assert starts[0] >= 1
    assert starts[-1] == every
    gaps = {(after - before) for before, after in zip(starts, [*starts[1:], starts[0] + every], strict=True)}
    assert gaps <= {every // fragments, -(-every // fragments)}


def test_sizes_are_dealt_once_each_and_evenly() -> None:
    sizes = [100, 7, 50, 50, 1, 93]
    parts = dealt(sizes, parts=3)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert sorted(sum(sizes[index] for index in part) for part in parts) == [100, 100, 101]
    assert dealt([3], parts=2) == ((0,), ())


def test_the_outer_rate_is_dilocos_and_rises_with_learners_and_steps() -> None:
    assert outer_learning_rate(learners=8, every=500) == 0.7
    rates = [outer_learning_rate(learners=learners, every=30) for learners in (2, 4, 8, 64, 4096)]
    assert rates == sorted(rates)
    assert outer_learning_rate(learners=2, every=30) < outer_learning_rate(learners=2, every=500)
    assert rates[-1] == 1.0


@pytest.mark.parametrize("kind", [kind for kind in SyncKind if kind.has_learners])
@pytest.mark.parametrize("every", [1, 2, 3, 30])
def test_usual_rounds_are_ones_that_their_kind_has(kind: SyncKind, every: int) -> None:
    rounds = usual_rounds(kind, every=every, learners=4)
    assert rounds.every == every
    assert rounds.delay * rounds.fragments <= every
    assert (rounds.delay == 0) == kind.waits
    assert rounds.fragments == 1 or kind.in_parts


def test_the_usual_outer_learning_rate_follows_learners_and_rounds_and_a_chosen_one_stays() -> None:
    for kind in (kind for kind in SyncKind if kind.has_learners):
        usual = usual_rounds(kind, every=4, learners=4)
        fewer = as_usual(usual, usual, kind=kind, learners=2, were=4)
        assert fewer == replace(usual, learning_rate=usual_rounds(kind, every=4, learners=2).learning_rate)
        assert as_usual(fewer, fewer, kind=kind, learners=4, were=2) == usual
        longer = as_usual(replace(usual, every=400), usual, kind=kind, learners=4, were=4)
        assert longer.learning_rate == usual_rounds(kind, every=400, learners=4).learning_rate
        assert (longer.learning_rate > usual.learning_rate) == (kind in (SyncKind.DILOCO, SyncKind.STREAMING))
        chosen = replace(usual, learning_rate=0.123)
        assert as_usual(chosen, chosen, kind=kind, learners=2, were=4) is chosen


def test_rounds_that_step_by_a_momentum_have_a_least_number_of_steps() -> None:
    assert SyncKind.STREAMING.least_every == 4
    assert SyncKind.EVERY_STEP.least_every == SyncKind.LOCAL.least_every == 1
    for kind in (kind for kind in SyncKind if kind.has_learners):
        rounds = usual_rounds(kind, every=kind.least_every, learners=2)
        assert rounds.momentum < 0.5 or kind.least_every >= 4
