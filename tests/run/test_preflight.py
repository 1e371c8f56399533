"""What is refused before any worker starts, and in which words; and what is let through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import cost
from meshwright.run import preflight
from meshwright.run.files import write_json
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.job import CheckpointSpec, JobSpec
from meshwright.spec.optimizer import Muon, OptimizerKind, ParameterGroup
from meshwright.spec.plan import Design
from meshwright.spec.report import MemoryPart, Report, StageMemory
from tests.run.runs import design


def needing(made: Design, num_bytes: float) -> Report:
    stage = StageMemory(rank=0, parts={MemoryPart.ACTIVATIONS: num_bytes}, capacity=num_bytes)
    return replace(cost.predict(made), memory=(stage,))


def test_a_small_run_is_let_through(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    preflight.check_design(made)
    preflight.check_run_dir(made, run_dir=tmp_path / "run", resume=False)
    preflight.check_machine(made, predicted=cost.predict(made), run_dir=tmp_path / "run")


def test_memory_is_compared_with_what_is_free(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    with pytest.raises(EnvironmentUnfit, match=r"predicted to need 1 PiB and .* is free"):
        preflight.check_machine(made, predicted=needing(made, 2.0**50), run_dir=tmp_path)


def test_disk_is_compared_with_what_is_free(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4, checkpoint=CheckpointSpec(keep=10**12))
    with pytest.raises(EnvironmentUnfit, match=r"checkpoints need .*job\.checkpoint\.keep"):
        preflight.check_machine(made, predicted=needing(made, 1.0), run_dir=tmp_path / "not" / "there")


def test_every_lack_is_told_at_once(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4, checkpoint=CheckpointSpec(keep=10**12))
    group = made.cluster.groups[0]
    groups = (replace(group, device=replace(group.device, kind=DeviceKind.CUDA)),)
    elsewhere = replace(made, cluster=replace(made.cluster, groups=groups))
    with pytest.raises(EnvironmentUnfit) as caught:
        preflight.check_machine(elsewhere, predicted=needing(made, 2.0**50), run_dir=tmp_path)
    told = [problem.where for problem in caught.value.problems]
    assert told == [f"cluster {made.cluster.name}", str(tmp_path)]


def test_an_illegal_plan_is_refused_by_a_named_rule(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    broken = replace(made, plan=replace(made.plan, microbatch=3))
    with pytest.raises(ConfigError, match="rule "):
        preflight.check_design(broken)


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="file: is a file, not a directory"):
            preflight.check_run_dir(made, run_dir=place, resume=False)


def test_text_and_tokenizer_are_checked_without_a_design(tmp_path: Path) -> None:
    data = design(tmp_path, steps=4).job.data
    preflight.check_job(JobSpec(data=data))
    for changed, told in (
        (replace(data, sources=()), "no text is given"),
        (replace(data, tokenizer="train:0"), "is no tokenizer"),
        (replace(data, tokenizer="train:x"), "is no tokenizer"),
        (replace(data, tokenizer=str(tmp_path / "none.json")), "no such tokenizer file"),
    ):
        with pytest.raises(ConfigError, match=told):
            preflight.check_job(JobSpec(data=changed))


def test_a_run_goes_on_with_the_optimizer_it_has_state_for(tmp_path: Path) -> None:
    begun = design(tmp_path, steps=2)
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "design.json", begun)
    group = ParameterGroup(names=("head.*",), kind=OptimizerKind.SGD)
    for optimizer in (Muon(), replace(begun.job.optimizer, groups=(group,))):
        other = replace(begun, job=replace(begun.job, optimizer=optimizer))
        with pytest.raises(ConfigError, match="what its optimizer keeps of each parameter would be lost"):
            preflight.check_run_dir(other, run_dir=tmp_path / "run", resume=True)
    slower = replace(begun, job=replace(begun.job, optimizer=replace(begun.job.optimizer, learning_rate=1e-5)))
    preflight.check_run_dir(slower, run_dir=tmp_path / "run", resume=True)
