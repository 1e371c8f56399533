"""Blocks that other numbers of data parallel ranks divide than the shard axis has: hybrid, full and whole by group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy
import pytest

from meshwright.spec.cluster import Precision
from meshwright.spec.compression import PowerSgd, TopK
from meshwright.spec.job import ElasticSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec
from meshwright.spec.plan import Design, Offload, Recompute, ScheduleKind, Sharding
from meshwright.spec.synchronize import GradientSync, SyncKind
from tests.parallel import learner_move_cases, outer_cases, parity_cases, relocate_cases, test_outer
from tests.parallel.move_cases import go_on, train
from tests.parallel.offload_cases import with_groups
from tests.parallel.parity_cases import TOLERANCE, Documents, Outcome
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design, sharded
from tests.support.pool import Pool

ADAMW = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
ZERO3 = Sharding.PARAMETERS
TWICE = Layout(replicate=2, shard=2, sharding=ZERO3, microbatch=1, batch=8)

# A model's kind, a layout, how every block of two layers is sharded, over how many ranks, and the optimizer.
Case = tuple[str, Layout, str, str, Optimizer]
QUICK: dict[str, Case] = {
    "whole beside zero3": ("tiny", Layout(shard=2, sharding=ZERO3, batch=4), "1331", "1..1", ADAMW),
    "whole, hybrid and full": ("tiny", TWICE, "1323", "1.44", ADAMW),
}
MORE: dict[str, Case] = {
    "whole zero3": ("gpt", TWICE, "3313", "1.4.", ADAMW),
    "muon": ("tiny", TWICE, "1323", "14.1", Muon(learning_rate=1e-2, clip_norm=0.5)),
    "adafactor": ("tiny", TWICE, "1323", "14.1", Adafactor(learning_rate=1e-2, clip_norm=0.5)),
    "three of six": ("tiny", Layout(replicate=2, shard=3, sharding=ZERO3, batch=6), "1332", "1.66", ADAMW),
    "a tied table": ("tied", TWICE, "1331", "4.14", ADAMW),
    "a tied table across stages": (
        "tied",
        Layout(pipeline=2, shard=2, sharding=ZERO3, batch=4),
        "1331",
        "1.11",
        ADAMW,
    ),
    "tensor ranks": (
        "tiny",
        Layout(replicate=2, shard=2, tensor=2, sequence_parallel=True, sharding=ZERO3, batch=8),
        "1323",
        "14.1",
        ADAMW,
    ),
    "context ranks": ("tiny", Layout(shard=2, context=2, sharding=ZERO3, batch=4), "1323", "1.1.", ADAMW),
    "halves of backwards": (
        "tiny",
        Layout(pipeline=2, replicate=2, shard=2, sharding=ZERO3, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=16),
        "1323",
        "14.1",
        ADAMW,
    ),
    "computed again, two stages a rank": (
        "tiny",
        Layout(
            pipeline=2,
            chunks=2,
            replicate=2,
            shard=2,
            sharding=ZERO3,
            kind=ScheduleKind.BREADTH_FIRST,
            recompute=Recompute.FULL,
            batch=16,
        ),
        "1323",
        "14.1",
        ADAMW,
    ),
}


def made(case: Case) -> Design:
    kind, layout, word, over, optimizer = case
    model = replace(models.all_models()[kind], layers=(models.all_models()[kind].layers[0],) * 2)
    entry = sharded(design(model, layout), word, over=over)
    return replace(entry, job=replace(entry.job, optimizer=optimizer))


@cache
def reference(model: ModelSpec, count: int, optimizer: Optimizer) -> Outcome:
    return parity_cases.one_device(
        model, count=count, length=SEQUENCE, z_loss=0.0, optimizer=optimizer, packed=Documents.TWO
    )


def check(pool: Pool, case: Case) -> None:
    compare(pool, made(case))


def compare(pool: Pool, entry: Design, *, bound: float = 0.0) -> None:
    """With what one device gives: exactly, or up to a share of it where gradients are rounded."""
    found = pool.run(parity_cases.one_rank, entry, Documents.TWO, ranks=entry.plan.world_size)
    wanted = reference(entry.model, entry.plan.batch, entry.job.optimizer)
    if bound:
        parity_cases.compare_roughly(wanted, found, bound=bound)
    else:
        parity_cases.compare(wanted, found)


def meeting(word: str, over: str, gradients: GradientSync) -> Design:
    entry = made(("tiny", TWICE, word, over, ADAMW))
    return replace(entry, plan=replace(entry.plan, gradients=gradients))


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Pool]:
    """Workers of its own: after a mesh on some of them they are in unlike numbers of groups."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.mark.parametrize("name", QUICK)
def test_groups_over_other_ranks_give_what_one_device_gives(pool: Pool, name: str) -> None:
    check(pool, QUICK[name])


def test_their_state_is_that_of_any_other_plan(pool: Pool, tmp_path: Path) -> None:
    """Through a checkpoint and back, the moments of a block on one rank, two or four."""
    by_group = made(("tiny", TWICE, "1323", "1.44", ADAMW))
    alike = replace(by_group, plan=made(("tiny", Layout(shard=4, sharding=ZERO3, batch=8), "3333", "", ADAMW)).plan)
    expected = pool.run(train, by_group, str(tmp_path / "by group"), 2, 2, ranks=4)[0]
    again = pool.run(train, alike, str(tmp_path / "alike"), 2, 2, ranks=4)[0]
    assert again == pytest.approx(expected, abs=1e-9)
    for folder, target in (("by group", alike), ("alike", by_group)):
        for losses, counts in pool.run(go_on, target, str(tmp_path / folder), 2, 2, ranks=4):
            assert losses == pytest.approx(expected[2:], abs=1e-9)
            assert counts == {2.0}


@pytest.mark.parametrize("forth", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_their_state_moves_in_the_least_bytes(own_pool: Pool, forth: bool) -> None:
    three = Layout(shard=3, sharding=ZERO3, batch=9)
    sides = [made(("tiny", TWICE, "1323", "1.44", ADAMW)), made(("tiny", three, "2323", "1..1", ADAMW))]
    sides = sides if forth else sides[::-1]
    places = {4: (0, 1, 2, 3), 3: (0, 2, 3)}
    ours, theirs = (places[side.plan.world_size] for side in sides)
    found = own_pool.run(relocate_cases.moved, sides[0], sides[1], ours, theirs, None, ranks=4)
    for seen in found:
        assert seen.unlike == []
        assert seen.losses == pytest.approx(found[0].alone if seen.losses else [], rel=0, abs=1e-9)
    assert any(seen.losses for seen in found)
    assert sum(seen.sent for seen in found) == sum(seen.received for seen in found) == found[0].least


@pytest.mark.parametrize(
    ("kind", "word", "over"),
    [
        (Offload.PARAMETERS, "3333", "1.4."),
        pytest.param(Offload.PARAMETERS, "3333", ".4.4", marks=pytest.mark.slow),
        pytest.param(Offload.OPTIMIZER, "1323", "1.4.", marks=pytest.mark.slow),
        pytest.param(Offload.ACTIVATIONS, "1323", "1.4.", marks=pytest.mark.slow),
    ],
)
def test_what_of_them_lies_in_the_hosts_memory_changes_no_number(
    pool: Pool, kind: Offload, word: str, over: str
) -> None:
    compare(pool, with_groups(made(("tiny", TWICE, word, over, ADAMW)), offload=kind))


def test_gradients_of_which_all_is_sent_are_whole(pool: Pool) -> None:
    """The largest of all elements, among two replicas of some blocks, four of others and none of the rest."""
    compare(pool, meeting("1323", "14.1", GradientSync(compression=TopK(share=1.0))))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_gradients_in_eight_bits_are_near_them(pool: Pool, precision: Precision) -> None:
    compare(pool, meeting("1323", "14.1", GradientSync(precision=precision)), bound=0.1)


@pytest.mark.slow
def test_gradients_are_whole_until_they_are_compressed(pool: Pool) -> None:
    compare(pool, meeting("1323", "14.1", GradientSync(compression=PowerSgd(rank=2, start_step=5))))


@pytest.mark.parametrize(
    ("shard", "word", "over", "kind"),
    [
        (2, "1331", "1..1", SyncKind.STREAMING),
        pytest.param(2, "3131", "1111", SyncKind.EAGER, marks=pytest.mark.slow),
        pytest.param(4, "1322", "1.21", SyncKind.DILOCO, marks=pytest.mark.slow),
    ],
)
def test_so_do_learners_each_over_its_own_ranks(pool: Pool, shard: int, word: str, over: str, kind: SyncKind) -> None:
    layout = Layout(replicate=2, shard=shard, sharding=ZERO3, batch=8)
    test_outer.train_as_one_device_does(pool, sharded(test_outer.met(layout, kind), word, over=over))


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        (SyncKind.STREAMING, False, ("1331", "1..1", "3131", ".11.")),
        pytest.param(SyncKind.EAGER, True, ("1331", "1..1", "3333", ""), marks=pytest.mark.slow),
        pytest.param(SyncKind.EAGER, False, ("3333", "", "1331", "1..1"), marks=pytest.mark.slow),
        pytest.param(SyncKind.DILOCO, False, ("1331", "1..1", "3131", ".11."), marks=pytest.mark.slow),
        (SyncKind.CO2, False, ("1331", "1..1", "3131", ".11.")),
        pytest.param(SyncKind.STREAMING, True, ("1331", "1..1", "3131", ".11."), marks=pytest.mark.slow),
        pytest.param(SyncKind.CO2, True, ("3333", "", "1331", "1..1"), marks=pytest.mark.slow),
    ],
)
def test_learners_of_them_go_on_in_another_plan(
    pool: Pool, tmp_path: Path, kind: SyncKind, files: bool, words: tuple[str, str, str, str]
) -> None:
    """In the middle of a round, while something travels: parameters, both optimizers, what all learners go from and
    what is on its way."""
    first, second = (learning(kind, *words[:2]), learning(kind, *words[2:]))
    at, steps = test_outer.ROUNDS[kind].every + 1, 3 * test_outer.ROUNDS[kind].every + 1
    wanted = outer_cases.reference(second, steps)
    folder = str(tmp_path / "state") if files else None
    for learner, own in pool.run(learner_move_cases.carried, first, second, at, steps, folder, ranks=4):
        assert own
        for name, value in own.items():
            numpy.testing.assert_allclose(value, wanted[learner][name], rtol=0, atol=TOLERANCE, err_msg=name)


def learning(kind: SyncKind, word: str, over: str) -> Design:
    """Two learners of two ranks each, who keep what they sent."""
    layout = Layout(replicate=2, shard=2, sharding=ZERO3, batch=8)
    entry = sharded(test_outer.met(layout, kind), word, over=over)
    return replace(entry, job=replace(entry.job, elastic=ElasticSpec(min_ranks=2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_beside_every_other_axis_too(pool: Pool, name: str) -> None:
    check(pool, MORE[name])
