"""Learners that meet in rounds are those of the papers, in every layout, and go on as if they had not been stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from meshwright.parallel.outer.pace import Pace
from meshwright.search.fewer_learners import fewer_learners
from meshwright.spec.cluster import Precision
from meshwright.spec.job import ElasticSpec
from meshwright.spec.model import Head
from meshwright.spec.optimizer import OptimizerSpec, Sgd
from meshwright.spec.plan import Design, ScheduleKind, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind, usual_rounds
from tests.parallel import absence_cases, outer_cases
from tests.parallel.outer_cases import Absence
from tests.parallel.parity_cases import TOLERANCE
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

CO2 = Rounds(every=3, delay=3, momentum=0.3, learning_rate=0.9, clip=0.004, precision=Precision.FP64)
ROUNDS = {
    SyncKind.LOCAL: Rounds(every=3, precision=Precision.FP64),
    SyncKind.DILOCO: Rounds(every=3, learning_rate=0.7, momentum=0.9, precision=Precision.FP64),
    SyncKind.EAGER: Rounds(every=3, delay=3, learning_rate=0.8, momentum=0.5, precision=Precision.FP64),
    SyncKind.CO2: CO2,
    SyncKind.STREAMING: Rounds(
        every=5, delay=2, fragments=2, learning_rate=0.7, momentum=0.9, own_share=0.5, precision=Precision.FP64
    ),
}
EAGER_IN_PARTS = Rounds(every=5, delay=2, fragments=2, learning_rate=0.8, momentum=0.5, precision=Precision.FP64)
LAYOUTS = {
    "replicas": Layout(replicate=2, batch=4),
    "sharded": Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=8),
    "zero1": Layout(replicate=2, shard=2, sharding=Sharding.OPTIMIZER, batch=8),
    "pipeline": Layout(replicate=2, pipeline=2, batch=4, kind=ScheduleKind.ONE_F_ONE_B),
    "tensor": Layout(replicate=2, tensor=2, batch=8, sequence_parallel=True),
}
STEPS = 8
FOUR = Layout(replicate=4, batch=12)
# Steps that a learner lost in the middle of a round had done since all of its work was in what all go from.
DROPPED_STEPS = {
    SyncKind.LOCAL: 1,
    SyncKind.DILOCO: 1,
    SyncKind.EAGER: 4,
    SyncKind.CO2: 4,
    SyncKind.STREAMING: 6,
}


def met(layout: Layout, kind: SyncKind, rounds: Rounds | None = None, *, tied: bool = False) -> Design:
    """A design whose replicas are learners."""
    head = Head(vocab=models.VOCAB, width=models.WIDTH, norm=models.NORM, tied=tied)
    entry = design(models.model(layers=2, head=head), layout)
    gradients = GradientSync(kind=kind, precision=Precision.FP64, rounds=rounds or ROUNDS[kind])
    optimizer = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
    return replace(entry, plan=replace(entry.plan, gradients=gradients), job=replace(entry.job, optimizer=optimizer))


@pytest.mark.parametrize(
    ("layout", "kind", "rounds"),
    [
        *(("replicas", kind, rounds) for kind, rounds in ROUNDS.items()),
        *sampled(((layout, SyncKind.STREAMING, None) for layout in ("sharded", "pipeline", "tensor")), quick=1),
        *sampled(((layout, SyncKind.CO2, None) for layout in ("zero1", "pipeline", "tensor")), quick=1),
        ("pipeline", SyncKind.EAGER, None),
        *sampled(((layout, SyncKind.EAGER, EAGER_IN_PARTS) for layout in ("sharded", "replicas", "pipeline")), quick=1),
        ("replicas", SyncKind.EAGER, replace(EAGER_IN_PARTS, every=4, delay=1)),
    ],
)
def test_learners_are_those_of_the_papers(pool: Pool, layout: str, kind: SyncKind, rounds: Rounds | None) -> None:
    train_as_one_device_does(pool, met(LAYOUTS[layout], kind, rounds, tied=layout == "pipeline"))


def train_as_one_device_does(pool: Pool, entry: Design) -> None:
    """Two learners, after STEPS steps, are what the same training on one device has made of them."""
    wanted = outer_cases.reference(entry, STEPS)
    mean = {name: numpy.mean([learner[name] for learner in wanted], axis=0) for name in wanted[0]}
    seen: set[tuple[int, str]] = set()
    for learner, own, together in pool.run(outer_cases.trained, entry, STEPS, ranks=entry.plan.world_size):
        for name, value in own.items():
            numpy.testing.assert_allclose(value, wanted[learner][name], rtol=0, atol=TOLERANCE, err_msg=name)
            numpy.testing.assert_allclose(together[name], mean[name], rtol=0, atol=TOLERANCE, err_msg=name)
            seen.add((learner, name))
    assert seen == {(learner, name) for learner in range(2) for name in mean}


@pytest.mark.parametrize("layout", ["replicas", "pipeline"])
def test_what_travels_goes_on_after_every_forward_pass_of_a_stage(pool: Pool, layout: str) -> None:
    """In rounds of four steps a part sets out after the second and the fourth, and lands one later."""
    rounds = Rounds(every=4, delay=1, fragments=2, precision=Precision.INT8)
    entry = met(LAYOUTS[layout], SyncKind.EAGER, rounds)
    for found in pool.run(outer_cases.went_on, entry, 6, ranks=LAYOUTS[layout].ranks):
        passes = entry.plan.schedule.microbatches
        assert found == [0, 0, passes, 0, passes, 0]


@pytest.mark.parametrize(
    ("layout", "kind", "lost"),
    [
        (FOUR, SyncKind.EAGER, 1),
        *(
            pytest.param(FOUR, kind, 1, marks=pytest.mark.slow)
            for kind in (SyncKind.LOCAL, SyncKind.DILOCO, SyncKind.CO2, SyncKind.STREAMING)
        ),
        (LAYOUTS["sharded"], SyncKind.STREAMING, 0),
        pytest.param(LAYOUTS["sharded"], SyncKind.DILOCO, 1, marks=pytest.mark.slow),
        pytest.param(FOUR, SyncKind.STREAMING, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_learners_go_on_without_a_lost_one_and_take_it_back(
    pool: Pool, layout: Layout, kind: SyncKind, lost: int | None
) -> None:
    """Lost in the middle of a round while something travels, back at the end of one; the other of two goes on alone;
    where none is lost and a link has dropped nothing is changed."""
    entry = met(replace(layout, batch=12), kind)
    entry = replace(entry, job=replace(entry.job, elastic=ElasticSpec(min_ranks=2)))
    fewer = entry if lost is None else fewer_learners(entry, entry.plan.learners - 1)
    assert fewer is not None
    assert fewer.plan.batch == entry.plan.batch
    every = ROUNDS[kind].every
    absence = Absence(learner=lost, left=4 if every == 3 else 9, back=3 * every)
    wanted = outer_cases.reference(entry, 4 * every + 1, absence)
    found = pool.run(absence_cases.absent, entry, fewer, absence, 4 * every + 1, ranks=4)
    for learner, own, _ in found:
        for name, value in own.items():
            numpy.testing.assert_allclose(value, wanted[learner][name], rtol=0, atol=TOLERANCE, err_msg=name)
    steps = 0 if lost is None else DROPPED_STEPS[kind]
    assert max(dropped for _, _, dropped in found) == (steps * entry.plan.batch // entry.plan.learners, 0)


def test_averages_after_every_step_are_data_parallel_by_gradient_descent(pool: Pool) -> None:
    """Plain steps are linear in the gradient, so that the mean of what learners make of theirs is one of the mean."""
    layout = Layout(replicate=4, batch=8)
    learners = met(layout, SyncKind.LOCAL, Rounds(precision=Precision.FP64))
    plain = replace(learners.job, optimizer=Sgd(learning_rate=0.05, momentum=0.0, clip_norm=None))
    learners = replace(learners, job=plain)
    found = [own for _, own, _ in pool.run(outer_cases.trained, learners, 5, ranks=4)]
    one = replace(learners, plan=replace(learners.plan, gradients=GradientSync(precision=Precision.FP64)))
    for own, wanted in zip(found, pool.run(outer_cases.in_every_step, one, 5, ranks=4), strict=True):
        for name, value in own.items():
            numpy.testing.assert_allclose(value, wanted[name], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "kind", "precision", "at"),
    [
        ("replicas", SyncKind.EAGER, Precision.FP64, 5),
        ("sharded", SyncKind.STREAMING, Precision.INT8, 6),
        ("pipeline", SyncKind.CO2, Precision.FP8, 4),
        pytest.param("tensor", SyncKind.DILOCO, Precision.BF16, 5, marks=pytest.mark.slow),
        ("replicas", SyncKind.STREAMING, Precision.INT4, 7),
    ],
)
def test_a_run_goes_on_bit_by_bit_while_something_travels(
    pool: Pool, tmp_path: Path, layout: str, kind: SyncKind, precision: Precision, at: int
) -> None:
    entry = met(LAYOUTS[layout], kind, replace(ROUNDS[kind], precision=precision), tied=layout == "pipeline")
    assert all(pool.run(outer_cases.resumed, entry, str(tmp_path), at, 8, ranks=LAYOUTS[layout].ranks))


@pytest.mark.parametrize("at", [5, 6])
def test_learners_that_begin_within_a_round_go_on_bit_by_bit(pool: Pool, tmp_path: Path, at: int) -> None:
    """As where they go on from a checkpoint of another plan: of a round before there is nothing on its way."""
    entry = met(LAYOUTS["replicas"], SyncKind.EAGER)
    assert all(pool.run(outer_cases.resumed, entry, str(tmp_path), at, 12, 4, ranks=2))


@pytest.mark.parametrize(
    ("missed", "why"), [(False, "a byte changed on its way or in memory"), (True, "they met unlike numbers of times")]
)
def test_learners_that_went_from_unlike_parameters_are_named(pool: Pool, missed: bool, why: str) -> None:
    entry = met(LAYOUTS["replicas"], SyncKind.DILOCO)
    for told in pool.run(outer_cases.spoilt_anchor, entry, missed, ranks=2):
        assert "learners went from unlike parameters" in told
        assert why in told


def test_a_byte_that_changed_after_the_last_telling_is_found_before_a_save(pool: Pool) -> None:
    entry = met(LAYOUTS["replicas"], SyncKind.DILOCO, Rounds(every=40, momentum=0.9, precision=Precision.FP64))
    for told in pool.run(outer_cases.spoilt_late, entry, 18, ranks=2):
        assert "learners went from unlike parameters when step 18 was done" in told


@pytest.mark.parametrize("kind", [SyncKind.EAGER, SyncKind.STREAMING])
def test_rounds_change_at_one_step_everywhere_where_all_learners_need_longer_ones(pool: Pool, kind: SyncKind) -> None:
    entry = met(LAYOUTS["replicas"], kind)
    free = replace(entry, job=replace(entry.job, synchronize=SynchronizeSpec(kinds=(kind,), most_every=8)))
    first, other = pool.run(outer_cases.other_rounds, free, (11, 14), 40, ranks=2)
    assert first == other
    assert [(every, rate) for _, every, rate in first] == [(8, ROUNDS[kind].learning_rate)]
    usual = met(LAYOUTS["replicas"], kind, usual_rounds(kind, every=5, learners=2, precision=Precision.FP64))
    usual = replace(usual, job=free.job)
    for found in pool.run(outer_cases.other_rounds, usual, (11, 14), 40, ranks=2):
        assert [rate for *_, rate in found] == [usual_rounds(kind, every=8, learners=2).learning_rate]
    assert pool.run(outer_cases.other_rounds, entry, (11, 14), 20, ranks=2) == [[], []]


def test_rounds_stay_where_one_learner_waits_for_a_slower_one(pool: Pool) -> None:
    entry = met(LAYOUTS["replicas"], SyncKind.EAGER)
    free = replace(entry, job=replace(entry.job, synchronize=SynchronizeSpec(kinds=(SyncKind.EAGER,))))
    enough = entry.plan.gradients.rounds.every
    for needed in ((enough, 40), (40, enough)):
        assert pool.run(outer_cases.other_rounds, free, needed, 20, ranks=2) == [[], []]


@pytest.mark.parametrize("layout", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_ranks_of_a_learner_have_the_rounds_that_the_last_of_them_needs(pool: Pool, layout: str) -> None:
    entry = met(LAYOUTS[layout], SyncKind.EAGER)
    free = replace(entry, job=replace(entry.job, synchronize=SynchronizeSpec(kinds=(SyncKind.EAGER,), most_every=32)))
    needed, learners = [0] * 4, [entry.plan.ranks_of_learner(learner) for learner in range(2)]
    for ranks, each in zip(learners, ((4, 12), (20, 9)), strict=True):
        for rank, steps in zip(ranks, each, strict=True):
            needed[rank] = steps
    found = pool.run(outer_cases.other_rounds, free, tuple(needed), 40, ranks=4)
    assert [every for _, every, _ in found[0]] == [12]
    assert all(each == found[0] for each in found)


def test_rounds_of_another_length_have_the_outer_learning_rate_of_that_length() -> None:
    usual = usual_rounds(SyncKind.STREAMING, every=8, learners=4)
    pace = Pace(kind=SyncKind.STREAMING, rounds=usual, learners=4, most_every=400)
    assert pace.changed(400, step=8) == usual_rounds(SyncKind.STREAMING, every=400, learners=4)
    shortest = pace.changed(1, step=408)
    assert shortest is not None
    assert shortest == replace(usual, every=4, delay=1, learning_rate=shortest.learning_rate)
    assert shortest.learning_rate == usual_rounds(SyncKind.STREAMING, every=4, learners=4).learning_rate
    chosen = Pace(kind=SyncKind.STREAMING, rounds=replace(usual, learning_rate=0.5), learners=4, most_every=400)
    longer = chosen.changed(400, step=8)
    assert longer is not None
    assert (longer.every, longer.learning_rate) == (400, 0.5)
    capped = Pace(kind=SyncKind.DILOCO, rounds=Rounds(every=8), most_every=2)
    assert capped.changed(1, step=8) == Rounds(every=2)


def test_pace_follows_what_travels() -> None:
    pace = Pace(kind=SyncKind.EAGER, rounds=Rounds(every=6, delay=6), most_every=20)
    assert pace.needed(travelled=4, waited=0.0, step_seconds=1.0) == 5
    assert pace.needed(travelled=6, waited=1.5, step_seconds=1.0) == 10
    assert pace.needed(travelled=4, waited=0.3, step_seconds=1.0) == 5
    parts = Pace(kind=SyncKind.EAGER, rounds=Rounds(every=4, delay=1, fragments=4))
    assert [parts.needed(travelled=0, waited=waited, step_seconds=1.0) for waited in (0.05, 0.06)] == [4, 8]
    assert Pace(kind=SyncKind.LOCAL, rounds=Rounds(every=6)).needed(travelled=0, waited=1.0, step_seconds=1.0) == 19
    assert pace.changed(5, step=12) is None
    assert pace.changed(10, step=18) == Rounds(every=10, delay=10)
    assert [step for step in range(40) if pace.departs(0, step)] == [28, 38]
    assert [pace.away_since(0, step) for step in (18, 27, 28, 37, 38)] == [18, 18, 28, 28, 38]
    assert pace.changed(100, step=28) == Rounds(every=20, delay=20)
    assert pace.changed(2, step=48) == Rounds(every=2, delay=2)
    assert Pace(kind=SyncKind.EAGER, rounds=Rounds(every=6, delay=6)).changed(100, step=6) is None
    begun = Pace(kind=SyncKind.EAGER, rounds=Rounds(every=6, delay=6), begun=8)
    assert [begun.away_since(0, step) for step in (8, 11, 12, 17, 18)] == [None, None, 12, 12, 18]
