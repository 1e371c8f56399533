"""What a run goes on from, what it says when there is nothing, and when it refuses to begin again unsaid."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.run.files import write_json
from meshwright.run.outcome import Ended, ended_path, read_ended
from meshwright.run.resume import changes, check_resumable, going_on, is_done, nothing_left, steps_of
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import PowerSgd
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import CheckpointSpec, Decay, LearningRate
from meshwright.spec.plan import Sharding, Training
from meshwright.spec.synchronize import GradientSync
from meshwright.train.events import Ending
from meshwright.train.learning_rate import learning_rate
from tests.run.runs import design, saved
from tests.support.designs import Layout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of seven steps, of which every fifth was to be saved, as a failure leaves it; it has no checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "design.json", design(tmp_path, steps=20, checkpoint=CheckpointSpec(every_steps=5)))
    rows = [{"step": step, "loss": 3.0} for step in range(1, 8)] + [{"step": 9, "validation_loss": 3.0}]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + '\n{"step": 8, "lo')
    return folder


def test_checkpoints_that_are_gone_are_not_begun_again_unsaid(run: Path) -> None:
    assert steps_of(run) == 7
    with pytest.raises(ConfigError, match=r"reached step 7 and no complete checkpoint.*--run names another directory"):
        check_resumable(run)
    saved(run, 5)
    assert check_resumable(run) is None


def test_a_run_that_ended_well_had_saved(run: Path, tmp_path: Path) -> None:
    write_json(run / "design.json", design(tmp_path, steps=20))
    assert "reached step 7 and never saved a checkpoint; the run begins at step 0" in str(check_resumable(run))
    write_json(ended_path(run), Ended(ending=Ending.PAUSED, step=7, total_steps=20, tokens=7, seconds=1.0))
    with pytest.raises(ConfigError, match="no complete checkpoint of it is left"):
        check_resumable(run)


def test_a_run_has_no_step_left_once_its_last_state_is_saved(run: Path, tmp_path: Path) -> None:
    saved(run, 15)
    entry = design(tmp_path, steps=20, checkpoint=CheckpointSpec(every_steps=5))
    write_json(ended_path(run), Ended(ending=Ending.FINISHED, step=20, total_steps=20, tokens=7, seconds=1.0))
    assert nothing_left(run, entry) is None, "its last state is gone"
    saved(run, 20)
    assert nothing_left(run, entry) == read_ended(run)
    told = f"{run}: all 20 steps are done and none is left to train; --set job.total_tokens=... makes the run longer"
    assert str(is_done(run, entry)) == told
    longer = replace(entry, job=replace(entry.job, total_tokens=2 * entry.job.total_tokens))
    assert nothing_left(run, longer) is None
    ended_path(run).unlink()
    assert nothing_left(run, entry) is None, "it did not say how it ended"


def test_a_learning_rate_that_jumps_is_told(run: Path, tmp_path: Path) -> None:
    saved(run, 18)
    shape = LearningRate(decay=Decay.COSINE, warmup_steps=4, final_fraction=0.1)
    begun = design(tmp_path, steps=20, learning_rate=shape)
    (run / "design.json").write_text(begun.to_json())
    assert not going_on(run, begun)
    longer = replace(begun, job=replace(begun.job, total_tokens=4 * begun.job.total_tokens))
    lines = going_on(run, longer)
    assert [line.partition(" is ")[0] for line in lines] == ["job.total_tokens", "the learning rate"]
    was, now = (
        learning_rate(18, shape=shape, peak=begun.job.optimizer.learning_rate, total_steps=steps) for steps in (20, 80)
    )
    assert lines[1] == f"the learning rate is {now:.2e} in step 19; by the job until now it was {was:.2e}"
    constant = design(tmp_path, steps=20)
    (run / "design.json").write_text(constant.to_json())
    longer = replace(constant, job=replace(constant.job, total_tokens=4 * constant.job.total_tokens))
    assert [line.partition(" is ")[0] for line in going_on(run, longer)] == ["job.total_tokens"]


def test_a_checkpoint_that_is_spoilt_is_named(run: Path) -> None:
    (saved(run, 5) / "data").write_text("less")
    with pytest.raises(ConfigError, match=r"step-00000005 is corrupt: data has 4 bytes, not 7"):
        check_resumable(run)


def test_a_first_save_that_never_ended_is_no_loss(run: Path) -> None:
    (run / "checkpoints" / "step-00000005.partial").mkdir(parents=True)
    assert "never saved a checkpoint" in str(check_resumable(run))


def test_a_run_that_never_stepped_begins(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    assert check_resumable(run) == "nothing to go on from: it never saved a checkpoint; the run begins at step 0"


def test_what_is_another_from_here_on_is_a_line_each(tmp_path: Path) -> None:
    before = design(tmp_path, steps=20)
    optimizer = replace(before.job.optimizer, learning_rate=0.5, weight_decay=0.25)
    after = design(tmp_path, Layout(batch=8, shard=2, sharding=Sharding.GRADIENTS), steps=40, optimizer=optimizer)
    assert changes(before, before) == []
    assert [line.split(" is ")[0] for line in changes(before, after)] == [
        "the plan",
        "job.total_tokens",
        "job.optimizer.learning_rate",
        "job.optimizer.weight_decay",
    ]
    assert "job.optimizer.learning_rate is 0.5 from here on; it was 0.01" in changes(before, after)


def test_frozen_blocks_and_the_precision_of_gradients_are_told(tmp_path: Path) -> None:
    """Neither is in a plan's own words: as many blocks as before may be others."""
    made = design(tmp_path, steps=20)
    (group,) = made.plan.groups
    plans = []
    for first, stop in ((0, 1), (2, 3)):
        edges = sorted({group.start, first, stop, group.stop})
        groups = tuple(
            replace(group, start=a, stop=b, training=Training.FROZEN if a == first else Training.ALL)
            for a, b in pairwise(edges)
        )
        plans.append(replace(made.plan, stages=(replace(made.plan.stages[0], groups=groups),)))
    before, after = (replace(made, plan=plan) for plan in plans)
    after = replace(after, plan=replace(after.plan, gradients=GradientSync(precision=Precision.FP8)))
    lines = changes(before, after)
    assert "frozen blocks are 2 from here on; they were 0" in lines
    assert 'plan.gradients.precision is "fp8" from here on; it was "fp32"' in lines
    small = replace(made, plan=replace(made.plan, gradients=GradientSync(compression=PowerSgd(rank=2))))
    dropped = "what was still to be sent of gradients that met in powersgd of rank 2 is dropped: it was of the plan"
    assert f"{dropped} until now" in changes(small, made)
    assert not any("dropped" in line for line in (*changes(small, small), *changes(made, small)))
