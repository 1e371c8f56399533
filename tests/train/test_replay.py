"""A step that is made again by ranks that differ says who computes wrong now, before anything is undone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec.errors import WorkerFailed
from meshwright.spec.job import CheckpointSpec, Switch, Unlike, VerifySpec
from meshwright.spec.plan import Design, Sharding
from meshwright.train.events import Log, Replay, Replayed, RollBack, Saved, Verified
from meshwright.train.replay import can_replay, judged
from meshwright.train.verify import VerifyEvery
from tests.run import runs
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.train import spoilt_cases

Prints = tuple[tuple[int, ...], ...]


def told(*prints: tuple[int, int, int]) -> Replayed:
    return Replayed(step=3, prints=prints)


@pytest.mark.parametrize(
    ("prints", "wrong", "words"),
    [
        (((1, 1, 1), (1, 1, 1), (1, 1, 1)), (), "nobody computes wrong now"),
        (((1, 1, 1), (1, 1, 1), (2, 2, 1)), (2,), "rank 2 came to something else than ranks 0, 1, 2 should share"),
        (((1, 1, 1), (1, 1, 7), (1, 1, 1)), (1,), "rank 1 came to something else than"),
        (((1, 1, 1), (1, 1, 2), (1, 1, 3)), (0, 1, 2), "ranks 0, 1, 2 came to something else than"),
        (((1, 1, 1), (1, 2, 5), (1, 1, 1)), (1,), "rank 1 came to something else each time"),
        (((1, 2, 1), (3, 4, 1), (5, 6, 1)), (), "no rank comes to the same twice"),
    ],
)
def test_who_computes_wrong(prints: Prints, wrong: tuple[int, ...], words: str) -> None:
    found = judged(Replayed(step=3, prints=prints), ((0, 1, 2),))
    assert found.wrong == wrong
    assert words in found.words


def test_what_one_computes_wrong_others_have_that_compute_with_it() -> None:
    found = judged(told((1, 1, 1), (4, 4, 4), (2, 2, 2), (5, 5, 5)), ((0, 2), (1, 3)))
    assert found.wrong == (0, 2, 1, 3)
    assert found.words.endswith("; what one computes wrong others that compute with it have too")


def policy(unlike: Unlike) -> VerifyEvery:
    return VerifyEvery(spec=VerifySpec(every_steps=1, policy=unlike), alike=((0, 1, 2),), replays=True, good=2)


def test_ranks_are_replayed_before_the_run_goes_back() -> None:
    made = policy(Unlike.ROLL_BACK)
    unlike = Verified(step=3, prints=(1, 1, 2))
    assert list(made.react(unlike)) == [Replay(groups=((0, 1, 2),))]
    back, said = made.react(told((1, 1, 1), (1, 1, 1), (1, 1, 1)))
    assert back == RollBack(to=2)
    assert isinstance(said, Log)
    assert "rank 2 holds other parameters" in said.text
    assert "nobody computes wrong now; back to step 2" in said.text
    made.react(Saved(step=2, seconds=0.0))
    assert list(made.react(Verified(step=2, prints=(1, 1, 1)))) == []


@pytest.mark.parametrize("unlike", list(Unlike))
def test_who_computes_wrong_now_would_do_so_again(unlike: Unlike) -> None:
    made = policy(unlike)
    made.react(Verified(step=3, prints=(1, 1, 2)))
    with pytest.raises(WorkerFailed, match=r"replayed, rank 0 came to something else.*it computes wrong now"):
        made.react(told((9, 9, 9), (1, 1, 1), (1, 1, 1)))


def verified(folder: Path, layout: Layout, *, steps: int = 4) -> Design:
    made = runs.design(folder, layout, steps=steps)
    spec = VerifySpec(every_steps=1, policy=Unlike.ROLL_BACK)
    return replace(made, job=replace(made.job, verify=spec, checkpoint=CheckpointSpec(every_steps=1)))


def test_only_arithmetic_that_repeats_itself_is_replayed(tmp_path: Path) -> None:
    made = verified(tmp_path, Layout(replicate=2, batch=12))
    assert can_replay(made)
    assert not can_replay(replace(made, job=replace(made.job, compile=Switch.ON)))
    (group,) = made.cluster.groups
    assert not can_replay(replace(made, cluster=replace(made.cluster, groups=(group, replace(group, name="b")))))


def test_a_rank_whose_updates_are_wrong_is_named(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(
        spoilt_cases.miscomputing,
        verified(tmp_path, Layout(replicate=3, batch=12)),
        str(tmp_path / "run"),
        1,
        "update",
        ranks=3,
    )
    for said in found:
        assert "after step 2 rank 1 holds other parameters than ranks 0, 1, 2 should share" in said[-1]
        assert "replayed, rank 1 came to something else than ranks 0, 1, 2 should share" in said[-1]
        assert "--resume goes on from step 1" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "wrong", "where", "words"),
    [
        (Layout(replicate=3, batch=12), 2, "layer", "replayed, rank 2 came to something else than ranks 0, 1, 2"),
        (Layout(replicate=3, batch=12), 0, "restless", "replayed, rank 0 came to something else each time"),
        (Layout(replicate=2, batch=12), 1, "update", "replayed, ranks 0, 1 came to something else than"),
        (Layout(replicate=2, batch=12), 1, "once", "step 2 again: rank 1 had been wrong in silence"),
        (Layout(pipeline=2, replicate=2, batch=12), 3, "once", "step 2 again: rank 3 had been wrong in silence"),
        (Layout(pipeline=2, replicate=2, batch=12), 3, "update", "replayed, ranks 2, 3 came to something else than"),
        (Layout(tensor=2, replicate=2, batch=12), 3, "restless", "came to something else each time"),
        (
            Layout(shard=2, replicate=2, batch=12, sharding=Sharding.PARAMETERS),
            2,
            "once",
            "step 2 again: rank 2 had been wrong in silence",
        ),
        (
            Layout(shard=2, replicate=2, batch=12, sharding=Sharding.OPTIMIZER),
            2,
            "layer",
            "replayed, ranks 0, 2 came to something else than",
        ),
    ],
    ids=str,
)
def test_layouts(pool: Pool, layout: Layout, wrong: int, where: str, words: str, tmp_path: Path) -> None:
    made = verified(tmp_path, layout)
    found = pool.run(spoilt_cases.miscomputing, made, str(tmp_path / "run"), wrong, where, ranks=layout.ranks)
    assert words in " ".join(found[0]), found[0]
