"""What is in the place of a checkpoint and is none: a save says so and leaves it, and those who look pass over it."""

from __future__ import annotations

import errno
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.spec.errors import EnvironmentUnfit
from meshwright.train.checkpoint import Store, newest
from meshwright.train.checkpoint.find import path_of
from tests.parallel.move_cases import Runner, runner
from tests.support.designs import Layout, design
from tests.support.models import all_models


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    directory: Path
    run: Runner
    store: Store


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A directory with a whole checkpoint of step 2."""
    made = design(all_models()["tiny"], Layout(batch=8))
    run, store = runner(made), Store(tmp_path, design=made)
    store.save(run.state(), step=2, progress={})
    store.wait()
    return Saved(directory=tmp_path, run=run, store=store)


@pytest.mark.parametrize("name", ["step-00000007", "step-00000007.partial", "step-00000007.replaced"])
def test_a_file_in_the_place_of_a_checkpoint_is_told_and_stays(saved: Saved, name: str) -> None:
    (saved.directory / name).write_text("mine")
    saved.store.save(saved.run.state(), step=7, progress={})
    with pytest.raises(EnvironmentUnfit) as told:
        saved.store.wait()
    (problem,) = told.value.problems
    assert problem.what == "the checkpoint of step 7 was not saved"
    assert name in problem.why
    assert problem.fix.startswith("move away what is in its place, then resume; the checkpoint of step 2 is whole;")
    assert (saved.directory / name).read_text() == "mine"


def test_a_save_that_fails_after_it_counts_is_not_said_to_be_lost(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules["meshwright.train.checkpoint.write"], "_retain", full)
    saved.store.save(saved.run.state(), step=7, progress={})
    with pytest.raises(EnvironmentUnfit) as told:
        saved.store.wait()
    (problem,) = told.value.problems
    assert problem.what == "the checkpoint of step 7 was saved, and the run cannot go on"
    assert problem.fix.startswith("free space there, then resume; the checkpoint of step 7 is whole;")


def test_a_checkpoint_under_another_name_and_a_file_with_the_name_of_one_are_told(saved: Saved) -> None:
    copied, file = path_of(saved.directory, 9), path_of(saved.directory, 11)
    shutil.copytree(path_of(saved.directory, 2), copied)
    file.write_text("mine")
    found = newest(saved.directory)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 2
    assert [(problem.where, problem.what, problem.why) for problem in found.skipped] == [
        (str(file), "corrupt", "it is a file, not a folder"),
        (str(copied), "corrupt", "it holds step 2, which is not that of its name"),
    ]
