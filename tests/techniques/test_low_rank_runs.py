"""Runs that become low rank: the same under every layout, after every kill, and back where it does not go well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec.job import CheckpointSpec, EvaluationSpec
from meshwright.spec.low_rank import Cuttlefish, LowRank, Pufferfish
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Design, Sharding
from meshwright.train.events import Saved, StepDone
from tests.run.runs import BATCH, design
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.techniques.low_rank_cases import higher_after, ran, same_bits

STEPS = 16
SWITCH = Pufferfish(
    switch_at=8,
    ratio=0.5,
    least_dim=32,
    rewarm=3,
    refactorise_every=5,
    recovery_steps=2,
    frobenius_decay=0.1,
    rollback=None,
)
LAYOUTS = (
    Layout(batch=BATCH, replicate=2),
    Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS),
    Layout(batch=BATCH, tensor=2, sequence_parallel=True, microbatch=4),
    Layout(batch=BATCH, pipeline=2),
)


def low(folder: Path, layout: Layout, spec: LowRank = SWITCH, *, steps: int = STEPS, every: int = 0) -> Design:
    made = design(folder, layout, steps=steps, low_rank=spec, checkpoint=CheckpointSpec(every_steps=every, keep=1))
    return replace(made, job=replace(made.job, evaluation=EvaluationSpec(every_steps=0, tokens=1024)))


@pytest.mark.slow
def test_killed_between_the_save_and_the_switch_is_unbroken_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    made = low(tmp_path, LAYOUTS[1], replace(SWITCH, switch_at=3, rollback=1.0), steps=5)
    whole = pool.run(ran, made, str(tmp_path / "whole"), ranks=2)
    broken = pool.run(ran, made, str(tmp_path / "broken"), ((Saved, 3),), ranks=2)
    assert all(same_bits(one, other) for one, other in zip(whole, broken, strict=True))
    assert whole[0]["parameters"][3] > whole[0]["parameters"][4]
    assert "step-00000003" in whole[0]["kept"]
    assert whole[0]["decays"][0] == 0.0


@pytest.mark.slow
def test_every_layout_learns_as_one_device_across_the_switch(pool: Pool, tmp_path: Path) -> None:
    alone = ran(low(tmp_path, Layout(batch=BATCH)), str(tmp_path / "alone"))
    assert alone["parameters"][8] > alone["parameters"][9]
    assert len(alone["ranks"]) == 9
    for place, layout in enumerate(LAYOUTS):
        for found in pool.run(ran, low(tmp_path, layout), str(tmp_path / str(place)), ranks=2):
            assert found["losses"] == pytest.approx(alone["losses"], abs=1e-9), layout.name
            assert found["ranks"] == alone["ranks"]


@pytest.mark.slow
def test_killed_before_at_and_after_the_switch_is_unbroken_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    kills = ((StepDone, 7), (StepDone, 8), (Saved, 8), (StepDone, 9), (StepDone, 14))
    made = low(tmp_path, LAYOUTS[1], replace(SWITCH, rollback=1.0), every=3)
    whole = pool.run(ran, made, str(tmp_path / "whole"), ranks=2)
    broken = pool.run(ran, made, str(tmp_path / "broken"), kills, ranks=2)
    assert all(same_bits(one, other) for one, other in zip(whole, broken, strict=True))
    assert whole[0]["parameters"] == broken[0]["parameters"]
    assert whole[0]["parameters"][8] > whole[0]["parameters"][9]


@pytest.mark.slow
def test_ranks_that_settle_are_the_same_on_every_rank_and_after_a_kill(pool: Pool, tmp_path: Path) -> None:
    spec = Cuttlefish(
        interval=2, tolerance=0.03, settled=2, switch_by=12, least_ratio=0.1, least_dim=32, rewarm=2, rollback=None
    )
    made = low(tmp_path, LAYOUTS[1], spec, every=3)
    made = replace(made, job=replace(made.job, optimizer=OptimizerSpec(learning_rate=0.1)))
    whole = pool.run(ran, made, str(tmp_path / "whole"), ranks=2)
    broken = pool.run(ran, made, str(tmp_path / "broken"), ((StepDone, 5), (StepDone, 13)), ranks=2)
    assert whole[0]["ranks"] == whole[1]["ranks"]
    assert whole[0]["ranks"]
    assert all(same_bits(one, other) for one, other in zip(whole, broken, strict=True))


@pytest.mark.slow
def test_a_loss_above_the_dense_trend_brings_the_dense_run_back_for_good(pool: Pool, tmp_path: Path) -> None:
    made = low(tmp_path, LAYOUTS[1], replace(SWITCH, switch_at=6, rollback=0.02), steps=24, every=2)
    dense = low(tmp_path, LAYOUTS[1], replace(SWITCH, switch_at=23), steps=22)
    back = pool.run(ran, made, str(tmp_path / "back"), (), higher_after, ranks=2)[0]
    kept = pool.run(ran, dense, str(tmp_path / "dense"), ranks=2)[0]
    assert "goes back to step 6 and stays dense" in back["said"][-1]
    assert sum("switched" in line for line in back["said"]) == 1
    assert not back["ranks"]
    assert {step: loss for step, loss in back["losses"].items() if step <= 22} == kept["losses"]
    again = pool.run(ran, made, str(tmp_path / "again"), ((StepDone, 18), (Saved, 6)), higher_after, ranks=2)[0]
    assert same_bits(back, again)
