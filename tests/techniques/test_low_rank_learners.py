"""Runs of learners that become low rank: as ranks that meet in every step, killed anywhere, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from meshwright.spec.cluster import Precision
from meshwright.spec.low_rank import Cuttlefish, LowRank
from meshwright.spec.optimizer import OptimizerSpec, Sgd
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from meshwright.train.events import Event, Saved, StepDone
from tests.run.runs import BATCH
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.techniques.low_rank_cases import higher_after, ran, same_bits
from tests.techniques.test_low_rank_runs import SWITCH, low

TWO = Layout(batch=BATCH, replicate=2)
SHARDED = Layout(batch=BATCH, replicate=2, shard=2, sharding=Sharding.PARAMETERS)
WAYS = {
    SyncKind.DILOCO: Rounds(every=4, learning_rate=0.7, momentum=0.9, precision=Precision.FP64),
    SyncKind.EAGER: Rounds(every=4, delay=4, precision=Precision.INT8),
    SyncKind.STREAMING: Rounds(
        every=4, delay=2, fragments=2, learning_rate=0.7, momentum=0.9, own_share=0.5, precision=Precision.INT4
    ),
}
PLAIN = Sgd(learning_rate=0.05, momentum=0.0, clip_norm=None)


def learners(
    folder: Path, layout: Layout, kind: SyncKind, rounds: Rounds, spec: LowRank = SWITCH, *, steps: int, every: int = 0
) -> Design:
    made = low(folder, layout, spec, steps=steps, every=every)
    gradients = GradientSync(kind=kind, precision=Precision.FP64, rounds=rounds)
    job = replace(made.job, deterministic=True, synchronize=SynchronizeSpec(kinds=(kind,)))
    return replace(made, job=job, plan=replace(made.plan, gradients=gradients))


@pytest.mark.slow
def test_learners_that_average_after_every_step_learn_as_ranks_that_meet_in_every_step(
    pool: Pool, tmp_path: Path
) -> None:
    """Across the switch, under Frobenius decay, and where factors are balanced anew."""
    spec = replace(SWITCH, switch_at=3, refactorise_every=3)
    apart = learners(tmp_path, TWO, SyncKind.LOCAL, Rounds(precision=Precision.FP64), spec, steps=8)
    apart = replace(apart, job=replace(apart.job, optimizer=PLAIN))
    whole = low(tmp_path, TWO, spec, steps=8)
    whole = replace(whole, job=replace(whole.job, optimizer=PLAIN))
    found = pool.run(ran, apart, str(tmp_path / "apart"), ranks=2)
    wanted = pool.run(ran, whole, str(tmp_path / "whole"), ranks=2)
    assert wanted[0]["parameters"][3] > wanted[0]["parameters"][4]
    assert "balanced" in " ".join(wanted[0]["said"])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["ranks"] == theirs["ranks"]
        assert ours["held"].keys() == theirs["held"].keys()
        for name, value in theirs["held"].items():
            numpy.testing.assert_allclose(ours["held"][name], value, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [*((kind, TWO) for kind in WAYS), (SyncKind.STREAMING, SHARDED)], ids=str)
def test_learners_killed_before_at_and_after_the_switch_are_unbroken_bit_by_bit(
    pool: Pool, tmp_path: Path, kind: SyncKind, layout: Layout
) -> None:
    """The switch is due within a round, and made where it ends, with what was on its way."""
    spec = replace(SWITCH, switch_at=6, rollback=1.0)
    made = learners(tmp_path, layout, kind, WAYS[kind], spec, steps=19, every=3)
    kills: tuple[tuple[type[Event], int], ...] = ((StepDone, 7), (Saved, 8), (StepDone, 10), (StepDone, 14))
    whole = pool.run(ran, made, str(tmp_path / "whole"), ranks=layout.ranks)
    broken = pool.run(ran, made, str(tmp_path / "broken"), kills, ranks=layout.ranks)
    assert all(same_bits(one, other) for one, other in zip(whole, broken, strict=True))
    assert whole[0]["parameters"][8] > whole[0]["parameters"][9]
    assert sum("switched after step 8" in line for line in whole[0]["said"]) == 1
    assert [line for line in whole[0]["said"] if "balanced" in line] == [
        "low rank: factors are balanced anew after step 16"
    ]


@pytest.mark.slow
def test_ranks_of_what_learners_go_from_are_the_same_on_all_and_after_a_kill(pool: Pool, tmp_path: Path) -> None:
    spec = Cuttlefish(
        interval=2, tolerance=0.03, settled=2, switch_by=12, least_ratio=0.1, least_dim=32, rewarm=2, rollback=None
    )
    made = learners(tmp_path, SHARDED, SyncKind.EAGER, Rounds(every=3, delay=3), spec, steps=16, every=2)
    made = replace(made, job=replace(made.job, optimizer=OptimizerSpec(learning_rate=0.1)))
    whole = pool.run(ran, made, str(tmp_path / "whole"), ranks=4)
    broken = pool.run(ran, made, str(tmp_path / "broken"), ((StepDone, 5), (StepDone, 13)), ranks=4)
    assert whole[0]["ranks"]
    assert all(each["ranks"] == whole[0]["ranks"] for each in whole)
    assert all(same_bits(one, other) for one, other in zip(whole, broken, strict=True))


@pytest.mark.slow
def test_a_loss_above_the_dense_trend_brings_dense_learners_back(pool: Pool, tmp_path: Path) -> None:
    spec = replace(SWITCH, switch_at=6, rollback=0.02)
    made = learners(tmp_path, TWO, SyncKind.EAGER, WAYS[SyncKind.EAGER], spec, steps=24, every=2)
    dense = learners(
        tmp_path, TWO, SyncKind.EAGER, WAYS[SyncKind.EAGER], replace(SWITCH, switch_at=21), steps=24, every=2
    )
    back = pool.run(ran, made, str(tmp_path / "back"), (), higher_after, ranks=2)
    kept = pool.run(ran, dense, str(tmp_path / "dense"), ranks=2)
    assert "goes back to step 8 and stays dense" in back[0]["said"][-1]
    for each, other in zip(back, kept, strict=True):
        assert not each["ranks"]
        assert each["losses"] == other["losses"]
