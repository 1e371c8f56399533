"""One rank's loss is no number: every rank stops, skips or rolls back alike, and nothing lasting is touched by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from meshwright.spec.cluster import Precision
from meshwright.spec.job import CheckpointSpec, NonFinite, NonFiniteSpec, Spike, SpikeSpec
from meshwright.spec.model import Mixture
from meshwright.spec.plan import Design, Sharding
from meshwright.train.checkpoint import newest
from tests.run import runs
from tests.support.designs import Layout
from tests.support.models import all_models
from tests.support.pool import Pool
from tests.train import spoilt_cases

SHARDED = Layout(batch=runs.BATCH, shard=2, sharding=Sharding.GRADIENTS)
PIPELINED = Layout(batch=runs.BATCH, pipeline=2)


def biased(made: Design) -> Design:
    """The same over a model whose routers have biases, which every step moves."""
    layers = all_models()["mixture_full"].layers
    transform = layers[0].transform
    assert isinstance(transform, Mixture)
    transform = replace(transform, routing=replace(transform.routing, bias_rate=0.01))
    layer = replace(layers[0], transform=transform)
    return replace(made, model=replace(made.model, layers=(layer,) * len(made.model.layers)))


def of(folder: Path, layout: Layout, policy: NonFinite, *, steps: int = 4) -> Design:
    every = 2 if policy is NonFinite.ROLL_BACK else 0
    changes: dict[str, Any] = {
        "checkpoint": CheckpointSpec(every_steps=every),
        "non_finite": NonFiniteSpec(policy=policy, most_in_a_row=2),
    }
    return runs.design(folder, layout, steps=steps, **changes)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("step", "consumed", "read", "skipped"):
        assert found[name] == wanted[name], name
    for name, value in wanted["parameters"].items():
        numpy.testing.assert_array_equal(found["parameters"][name], value, err_msg=name)
    for one, other in zip(found["moments"], wanted["moments"], strict=True):
        numpy.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", [pytest.param(SHARDED, marks=pytest.mark.slow), PIPELINED], ids=str)
def test_a_skipped_batch_might_not_have_been_there(pool: Pool, layout: Layout, tmp_path: Path) -> None:
    design = of(tmp_path, layout, NonFinite.SKIP)
    design = biased(design) if layout is SHARDED else design
    found = pool.run(spoilt_cases.spoilt, design, str(tmp_path / "a"), (1, 2, 4), ranks=2)
    wanted = pool.run(spoilt_cases.without, design, str(tmp_path / "b"), (1, 2, 4), ranks=2)
    assert [rank["consumed"] for rank in found] == [7 * runs.BATCH] * 2
    size = runs.BATCH
    assert [rank["skipped"] for rank in found] == [[(size, 3 * size), (4 * size, 5 * size)]] * 2
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_a_roll_back_is_the_checkpoint_and_the_data_after_the_batch(pool: Pool, tmp_path: Path) -> None:
    design = of(tmp_path, SHARDED, NonFinite.ROLL_BACK)
    found = pool.run(spoilt_cases.spoilt, design, str(tmp_path / "a"), (3,), ranks=2)
    wanted = pool.run(spoilt_cases.without, design, str(tmp_path / "b"), (2, 3), ranks=2)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_a_step_that_leaps_is_left_out_as_one_that_is_no_number(pool: Pool, tmp_path: Path) -> None:
    design = of(tmp_path, SHARDED, NonFinite.STOP, steps=5)
    spike = SpikeSpec(policy=Spike.SKIP, window=4, deviations=60.0)
    design = replace(design, job=replace(design.job, spike=spike))
    found = pool.run(spoilt_cases.spoilt, design, str(tmp_path / "a"), (4,), 1e3, ranks=2)
    wanted = pool.run(spoilt_cases.without, design, str(tmp_path / "b"), (4,), ranks=2)
    assert [rank["skipped"] for rank in found] == [[(4 * runs.BATCH, 5 * runs.BATCH)]] * 2
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_a_stop_saves_the_last_good_state(pool: Pool, tmp_path: Path) -> None:
    design = of(tmp_path, SHARDED, NonFinite.STOP)
    for rank in pool.run(spoilt_cases.spoilt, design, str(tmp_path / "a"), (2,), ranks=2):
        assert (rank["step"], rank["consumed"]) == (2, 2 * runs.BATCH)
        assert "the loss of step 3 is nan" in rank["told"]
        assert "step 2 is saved" in rank["told"]
    kept = newest(tmp_path / "a" / "checkpoints").checkpoint
    assert kept is not None
    assert (kept.manifest.state["step"], kept.manifest.state["consumed"]) == (2, 2 * runs.BATCH)


def test_parameters_that_are_not_finite_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    design = of(tmp_path, SHARDED, NonFinite.STOP)
    design = replace(design, job=replace(design.job, checkpoint=CheckpointSpec(every_steps=1)))
    for told in pool.run(spoilt_cases.overshot, design, str(tmp_path / "a"), ranks=2):
        assert "parameters are not finite after step 1, and are not saved" in told
        assert "no checkpoint was saved before" in told
    assert newest(tmp_path / "a").checkpoint is None


def test_too_many_skips_stop(pool: Pool, tmp_path: Path) -> None:
    design = of(tmp_path, SHARDED, NonFinite.SKIP)
    for rank in pool.run(spoilt_cases.spoilt, design, str(tmp_path / "a"), (1, 2, 3), ranks=2):
        assert (rank["step"], rank["consumed"]) == (1, 3 * runs.BATCH)
        assert "3 steps in a row were like it" in rank["told"]


def test_what_rounding_left_of_a_spoilt_gradient_spoils_no_other(pool: Pool, tmp_path: Path) -> None:
    design = of(tmp_path, Layout(batch=runs.BATCH, replicate=2), NonFinite.SKIP)
    travel = replace(design.plan.gradients, precision=Precision.FP8)
    design = replace(design, plan=replace(design.plan, gradients=travel))
    for rank in pool.run(spoilt_cases.spoilt, design, str(tmp_path / "a"), (1, 3), ranks=2):
        assert (rank["step"], rank["consumed"], rank["told"]) == (4, 6 * runs.BATCH, "")
