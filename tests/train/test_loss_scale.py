"""Gradients of fp16 that overflow: the same batch goes again at half the scale, and nothing is lost by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from meshwright.spec.cluster import Precision
from meshwright.spec.job import CheckpointSpec
from meshwright.spec.plan import Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SyncKind
from meshwright.train.loss_scale import LossScale
from tests.run import runs
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.train import loss_scale_cases

SHARDED = Layout(batch=runs.BATCH, shard=2, sharding=Sharding.PARAMETERS, precision=Precision.FP16)
STAGES = Layout(batch=runs.BATCH, pipeline=2, precision=Precision.FP16)


def test_a_scale_falls_with_each_overflow_and_rises_after_many_steps() -> None:
    scale = LossScale()
    scale.shrink()
    assert scale.value == 2.0**15
    for _ in range(2000):
        assert scale.value == 2.0**15
        scale.hold()
    assert scale.value == 2.0**16
    scale.hold()
    again = LossScale()
    again.load(scale.to_dict())
    assert again == scale
    again.load({})
    assert again == LossScale()


@pytest.mark.parametrize("layout", [SHARDED, pytest.param(STAGES, marks=pytest.mark.slow)], ids=str)
def test_a_batch_that_overflows_goes_again(pool: Pool, layout: Layout, tmp_path: Path) -> None:
    design = runs.design(tmp_path, layout, steps=3)
    found = pool.run(loss_scale_cases.trained, design, str(tmp_path / "a"), 24, ranks=2)
    assert all(rank["exponent"] < 24 for rank in found)
    wanted = pool.run(loss_scale_cases.trained, design, str(tmp_path / "b"), found[0]["exponent"], ranks=2)
    for one, other in zip(found, wanted, strict=True):
        assert one["losses"] == other["losses"]
        assert (one["consumed"], one["read"]) == (other["consumed"], other["read"]) == (3 * runs.BATCH, one["read"])
        assert one["skipped"] == []
        for name, value in other["parameters"].items():
            numpy.testing.assert_array_equal(one["parameters"][name], value, err_msg=name)
    assert "its batch goes again" in found[0]["said"]


def test_a_run_goes_on_at_the_scale_it_had(pool: Pool, tmp_path: Path) -> None:
    design = runs.design(tmp_path, SHARDED, steps=4, checkpoint=CheckpointSpec(every_steps=2))
    whole = pool.run(loss_scale_cases.trained, design, str(tmp_path / "a"), 24, ranks=2)
    pool.run(loss_scale_cases.trained, design, str(tmp_path / "b"), 24, 2, ranks=2)
    again = pool.run(loss_scale_cases.trained, design, str(tmp_path / "b"), None, ranks=2)
    for one, other in zip(whole, again, strict=True):
        assert one["exponent"] == other["exponent"] < 24
        assert one["losses"][2:] == other["losses"]
        for name, value in one["parameters"].items():
            numpy.testing.assert_array_equal(other["parameters"][name], value, err_msg=name)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_learners_go_on_with_the_least_of_their_scales_when_they_save(
    pool: Pool, precision: Precision, tmp_path: Path
) -> None:
    """Steps that were done in fp16 are counted, and no others: those of no number are not done."""
    layout = Layout(batch=runs.BATCH, replicate=2, precision=precision)
    design = runs.design(tmp_path, layout, steps=4, checkpoint=CheckpointSpec(every_steps=4))
    apart = GradientSync(kind=SyncKind.DILOCO, rounds=Rounds(every=4, learning_rate=0.7, momentum=0.9))
    design = replace(design, plan=replace(design.plan, gradients=apart))
    found = pool.run(loss_scale_cases.saved, design, str(tmp_path / "a"), (9, 11), 2, ranks=2)
    assert found == [(9, 3 if precision is Precision.FP16 else 0)] * 2
