"""Real runs of learners that meet in rounds: stopped, gone on with, in other plans, and spoilt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from meshwright.run.audit import audit
from meshwright.run.generate import generate
from meshwright.run.train import train
from meshwright.spec.errors import ExitCode, Problem, WorkerFailed
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from meshwright.train.events import Ending
from meshwright.train.run import Run
from tests.run.runs import BATCH, after_steps, ask_to_stop, design, losses, validation
from tests.support.designs import Layout

STEPS = 24
EAGER = GradientSync(kind=SyncKind.EAGER, rounds=Rounds(every=5, delay=5))


def quiet(line: str) -> None:
    """Nobody watches a test."""


def learners(folder: Path, gradients: GradientSync = EAGER, *, steps: int = STEPS, **changes: Any) -> Design:
    allowed = SynchronizeSpec(kinds=(gradients.kind,))
    layout = Layout(batch=BATCH, replicate=2)
    made = design(folder, layout, steps=steps, deterministic=True, synchronize=allowed, **changes)
    return replace(made, plan=replace(made.plan, gradients=gradients))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two learners from their first step to their last."""
    folder = tmp_path_factory.mktemp("learners")
    outcome = train(learners(folder), run_dir=folder / "run", say=quiet)
    assert outcome.ended.ending is Ending.FINISHED
    assert outcome.measured is not None
    assert outcome.measured.step.find(LineName.OUTER) is not None
    return folder


def test_learners_learn_and_what_they_made_is_one_model(whole: Path) -> None:
    run = whole / "run"
    assert validation(run)[STEPS] < 0.7 * validation(run)[4]
    assert generate(run, "3 times", tokens=8, seed=5).text.startswith("3 times")


@pytest.mark.slow
def test_learners_that_a_signal_ended_go_on_bit_by_bit(whole: Path) -> None:
    run = whole / "stopped"
    sender = after_steps(run, 4, ask_to_stop)
    stopped = train(learners(whole), run_dir=run, say=quiet)
    sender.join()
    assert stopped.exit_code is ExitCode.SAVED
    assert stopped.ended.step < STEPS
    finished = train(learners(whole), run_dir=run, resume=True, say=quiet)
    assert finished.ended.ending is Ending.FINISHED
    assert losses(run) == losses(whole / "run")
    assert validation(run) == validation(whole / "run")
    found = audit(run, cache=whole / "cache")
    assert (found.read, found.dropped, found.problems) == (STEPS * BATCH, 0, ())


@pytest.mark.slow
def test_a_plan_without_learners_goes_on_from_their_mean(whole: Path) -> None:
    layout = Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS)
    train(design(whole, layout, steps=STEPS + 4), run_dir=whole / "run", resume=True, say=quiet)
    assert validation(whole / "run")[STEPS + 4] < 1.05 * validation(whole / "run")[STEPS]


@pytest.mark.slow
def test_a_loss_of_one_learner_that_is_not_finite_ends_the_run_with_what_was_good_saved(whole: Path) -> None:
    wild = OptimizerSpec(learning_rate=1e200, clip_norm=None)
    with pytest.raises(WorkerFailed, match=r"of step \d+ is (nan|inf)") as caught:
        train(learners(whole, optimizer=wild), run_dir=whole / "wild", say=quiet)
    assert "Traceback" not in str(caught.value)


def test_learners_that_parted_are_not_saved() -> None:
    parted, store = WorkerFailed(Problem(what="learners went from unlike parameters")), mock.Mock()
    outer = mock.Mock(check=mock.Mock(side_effect=parted))
    run = SimpleNamespace(
        state=SimpleNamespace(step=7), outer=outer, store=store, marker=mock.Mock(), _is_finite=lambda: True
    )
    with pytest.raises(WorkerFailed, match="unlike"):
        Run._save(cast(Run, run))
    outer.check.assert_called_once_with(7)
    store.save.assert_not_called()
