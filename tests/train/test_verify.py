"""Ranks that should hold the same bits: one that flips is found and its rank named, and the run goes on without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from meshwright.cost.alike import alike
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.job import CheckpointSpec, Unlike, VerifySpec
from meshwright.spec.plan import Design, Sharding
from meshwright.train.events import (
    Action,
    Ending,
    Log,
    RollBack,
    Saved,
    Started,
    StepDone,
    Stopping,
    Verified,
    Verify,
)
from meshwright.train.fingerprints import fingerprint
from meshwright.train.verify import VerifyEvery
from tests.run import runs
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.train import spoilt_cases

REPLICAS = Layout(batch=runs.BATCH, replicate=2)


def done(step: int) -> StepDone:
    return StepDone(step=step, tokens=0, loss=1.0, grad_norm=1.0, learning_rate=0.1, seconds=0.5, memory_bytes=0.0)


def says(actions: Iterable[Action]) -> str:
    return " ".join(action.text for action in actions if isinstance(action, Log))


def test_every_bit_counts() -> None:
    numbers = torch.randn(5, 3, dtype=torch.bfloat16), torch.randn(7), torch.arange(4, dtype=torch.uint8)
    whole = [*numbers, torch.empty(0)]
    before = fingerprint(whole)
    for x in numbers:
        flat = x.view(-1).view(torch.uint8)
        for place in range(len(flat)):
            for bit in (1, 16, 128):
                flat[place] ^= bit
                assert fingerprint(whole) != before
                flat[place] ^= bit
    assert fingerprint(whole) == before


def test_ranks_that_hold_the_same_are_those_of_the_layout(tmp_path: Path) -> None:
    def of(**axes: int | Sharding) -> tuple[tuple[int, ...], ...]:
        return alike(runs.design(tmp_path, Layout(batch=runs.BATCH, **axes), steps=1))

    assert of(replicate=2) == ((0, 1),)
    assert of(shard=2, sharding=Sharding.PARAMETERS) == ()
    assert of(pipeline=2, replicate=2) == ((0, 1), (2, 3))
    assert of(replicate=2, tensor=2) == ((0, 2), (1, 3))
    assert of(replicate=2, shard=2, sharding=Sharding.PARAMETERS) == ((0, 2), (1, 3))


def test_a_stop_names_who_is_in_the_minority() -> None:
    policy = VerifyEvery(spec=VerifySpec(every_steps=5), alike=((0, 1, 2), (3, 4)), good=5)
    assert list(policy.react(done(4))) == []
    assert list(policy.react(done(10))) == [Verify()]
    assert list(policy.react(Verified(step=10, prints=(1, 1, 1, 7, 7)))) == []
    with pytest.raises(WorkerFailed, match=r"after step 15 rank 1 holds other parameters than ranks 0, 1, 2.*step 5"):
        policy.react(Verified(step=15, prints=(1, 2, 1, 7, 7)))
    with pytest.raises(WorkerFailed, match="ranks 3, 4 hold unlike parameters"):
        policy.react(Verified(step=15, prints=(1, 1, 1, 8, 7)))


def test_a_checkpoint_counts_once_its_ranks_were_the_same() -> None:
    spec = VerifySpec(every_steps=10, policy=Unlike.ROLL_BACK)
    policy = VerifyEvery(spec=spec, alike=((0, 1),))
    assert list(policy.react(Saved(step=4, seconds=0.0))) == [Verify()]
    policy.react(Verified(step=4, prints=(1, 1)))
    policy.react(Saved(step=8, seconds=0.0))
    found = list(policy.react(Verified(step=8, prints=(1, 2))))
    assert found[0] == RollBack(to=4)
    assert "back to step 4" in says(found)
    assert list(policy.react(Verified(step=6, prints=(5, 5)))) == []
    assert "step 8 again: rank 0 had been wrong in silence" in says(policy.react(Verified(step=8, prints=(2, 2))))
    policy.react(Verified(step=10, prints=(1, 2)))
    with pytest.raises(WorkerFailed, match="they had differed after step 10, and the run went back since"):
        policy.react(Verified(step=10, prints=(3, 2)))


def test_a_run_whose_last_state_differs_does_not_end_well() -> None:
    spec = VerifySpec(every_steps=10, policy=Unlike.ROLL_BACK)
    policy = VerifyEvery(spec=spec, alike=((0, 1),), good=8)
    assert list(policy.react(Stopping(step=9, ending=Ending.FINISHED))) == []
    assert list(policy.react(Saved(step=9, seconds=0.0))) == [Verify()]
    with pytest.raises(WorkerFailed, match=r"remove the checkpoint of step 9, .*; --resume goes on from step 8"):
        policy.react(Verified(step=9, prints=(1, 2)))


def test_what_the_steps_that_are_done_again_tell() -> None:
    for prints, told in (
        ((4, 5), "no rank has what it had"),
        ((2, 2), "rank 0 had been wrong"),
    ):
        policy = VerifyEvery(spec=VerifySpec(every_steps=2, policy=Unlike.ROLL_BACK), alike=((0, 1),), good=0)
        policy.react(Verified(step=2, prints=(1, 2)))
        again = (4, 4) if prints == (4, 5) else prints
        assert told in says(policy.react(Verified(step=2, prints=again)))
    policy = VerifyEvery(spec=VerifySpec(every_steps=2), alike=())
    assert "no two ranks hold the same" in says(policy.react(Started(step=0, total_steps=9)))
    assert list(policy.react(done(2))) == []


def verified(folder: Path, policy: Unlike) -> Design:
    made = runs.design(folder, REPLICAS, steps=6)
    spec = VerifySpec(every_steps=1, policy=policy)
    return replace(made, job=replace(made.job, verify=spec, checkpoint=CheckpointSpec(every_steps=2)))


def test_a_bit_that_flips_is_found_and_the_run_ends_as_if_it_had_not(pool: Pool, tmp_path: Path) -> None:
    design = verified(tmp_path, Unlike.ROLL_BACK)
    found = pool.run(spoilt_cases.flipped, design, str(tmp_path / "a"), {6: 1}, ranks=2)
    wanted = pool.run(spoilt_cases.without, design, str(tmp_path / "b"), (), ranks=2)
    for one, other in zip(found, wanted, strict=True):
        assert (one["failure"], one["step"], one["read"]) == ("", 6, other["read"])
        for name, value in other["parameters"].items():
            numpy.testing.assert_array_equal(one["parameters"][name], value, err_msg=name)
    told = " ".join(found[0]["told"])
    differ = "after step 6 ranks 0, 1 hold unlike parameters, which should be the same"
    assert f"{differ}; replayed, all of them come to the same: nobody computes wrong now; back to step 4" in told
    assert "step 6 again: rank 1 had been wrong in silence" in told
    stopped = pool.run(spoilt_cases.flipped, verified(tmp_path, Unlike.STOP), str(tmp_path / "c"), {3: 0}, ranks=2)
    assert all("ranks 0, 1 hold unlike parameters" in rank["failure"] for rank in stopped)
    assert all("--resume goes on from step 2" in rank["failure"] for rank in stopped)
