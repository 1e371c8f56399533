"""`meshwright launch`: what is shown, written and refused."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.run.launching.start import Document
from meshwright.run.train import with_absolute_paths
from meshwright.spec.errors import ExitCode
from tests.run.launching.made import on_gpus, on_processors
from tests.run.runs import design, done


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(on_processors(tmp_path).to_json())
    return path


def test_a_script_is_shown_and_nothing_else_happens(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", str(plan), "--on", "slurm", "--run", str(tmp_path / "run"), "--time", "2h", "--grace", "90s"]
    assert main(words) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash\n#SBATCH --job-name=run\n")
    assert "#SBATCH --time=0-02:00:00\n#SBATCH --signal=B:USR1@90\n" in printed.out
    assert "nothing is written or started yet: --out FILE writes this, for `sbatch FILE`" in printed.err
    assert "90.0 s are kept to save in (asked for)" in printed.err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"place", "written", "exit_code", *(field.name for field in fields(Document))}
    assert (told["text"], told["nodes"], told["grace"]) == (printed.out, 2, 90)
    assert (told["written"], told["exit_code"]) == ([], None)


def test_what_the_nodes_read_is_written_with_the_script(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, script = tmp_path / "run", tmp_path / "job.sbatch"
    words = ["launch", str(plan), "--on", "slurm", "--run", str(run), "--out", str(script)]
    assert main([*words, "--set", "job.seed=5"]) == ExitCode.OK
    assert json.loads((run / "design.json").read_text())["job"]["seed"] == 5
    told = capsys.readouterr().err
    assert f"written to {script}; start it: sbatch {script}" in told
    assert f"{run} holds the design that the nodes read" in told
    assert script.read_text().startswith("#!/bin/bash")
    assert main(words) == ExitCode.USAGE
    assert "this directory holds a run already" in capsys.readouterr().err
    words += ["--resume", "--set", "job.seed=5"]
    assert main([*words, "--set", "job.learning_rate.warmup_steps=9"]) == ExitCode.OK
    assert "job.learning_rate.warmup_steps is 9 from here on" in capsys.readouterr().err


def test_a_run_that_is_done_is_not_launched_again(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, script = tmp_path / "run", tmp_path / "job.sbatch"
    done(run, with_absolute_paths(on_processors(tmp_path)))
    words = ["launch", str(plan), "--on", "slurm", "--run", str(run), "--resume"]
    assert main(words) == ExitCode.OK
    assert "it cannot start as it is" in capsys.readouterr().err
    assert main([*words, "--out", str(script), "--set", "job.checkpoint.keep=9"]) == ExitCode.USAGE
    assert "steps are done and none is left to train" in capsys.readouterr().err
    assert (run / "measured.json").is_file()
    assert not script.exists()


FAR = ["--run", "/mnt/first", "--image", "x", "--volume", "v:/mnt"]


@pytest.mark.parametrize(
    "words",
    [
        ["slurm"],
        ["ssh", "--hosts", "one,two"],
        ["local"],
        *(["kubernetes", *FAR], ["skypilot", *FAR], ["dstack", *FAR]),
    ],
    ids=lambda words: words[0],
)
def test_what_refuses_to_be_written_is_told_where_it_is_shown(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, says = on_processors(tmp_path), "job.data.sources: no text is given; --data names"
    plan, out = tmp_path / "plan.json", tmp_path / "out" / "go"
    plan.write_text(replace(made, job=replace(made.job, data=replace(made.job.data, sources=()))).to_json())
    monkeypatch.chdir(tmp_path)
    asked = ["launch", str(plan), "--on", *words]
    assert main(asked) == ExitCode.OK
    told = capsys.readouterr()
    assert f"it cannot start as it is: {says}" in told.err
    assert says not in told.out
    assert main([*asked, "--out", str(out)]) == ExitCode.USAGE
    assert f"error: {says}" in capsys.readouterr().err
    assert not out.exists()
    assert not (tmp_path / "runs").exists()


def test_a_machine_that_lacks_the_plan_s_devices_is_told_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "plan.json").write_text(on_gpus(tmp_path).to_json())
    words = ["launch", str(tmp_path / "plan.json"), "--on", "local", "--run", str(tmp_path / "run")]
    assert main(words) == ExitCode.OK
    assert "it cannot start as it is: cluster" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "go.sh")]) == ExitCode.ENVIRONMENT
    assert not (tmp_path / "go.sh").exists()


def test_slurm_is_handed_the_script(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncp "$2" {tmp_path}/handed\necho 12\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    words = ["launch", str(plan), "--on", "slurm", "--run", str(tmp_path / "run"), "--submit"]
    assert main(words) == ExitCode.OK
    printed = capsys.readouterr()
    assert (tmp_path / "handed").read_text() == printed.out
    assert (tmp_path / "run" / "run.sbatch").read_text() == printed.out
    assert "job 12: squeue -j 12 tells how it is" in printed.err


def test_files_beside_a_manifest_are_written_too(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "task.dstack.yml"
    words = ["--run", "/mnt/first", "--image", "x", "--volume", "v:/mnt", "--out", str(out)]
    assert main(["launch", str(plan), "--on", "dstack", *words]) == ExitCode.OK
    assert (out.parent / "first.design.json").is_file()
    assert not Path("/mnt/first").exists()


def test_here_the_command_is_train_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.json").write_text(design(tmp_path, steps=4).to_json())
    words = ["launch", str(tmp_path / "one.json"), "--on", "local", "--run", str(tmp_path / "run"), "--time", "1h"]
    assert main(words) == ExitCode.OK
    said = capsys.readouterr().out
    assert said == f"meshwright train {tmp_path}/one.json --run {tmp_path}/run --stop-after 3600\n"
    asked: list[dict[str, object]] = []

    def train(_design: object, **options: object) -> object:
        from meshwright.run.outcome import Ended, Outcome
        from meshwright.train.events import Ending
        from tests.cli.test_train import REPORT

        asked.append(options)
        ended = Ended(ending=Ending.SIGNALLED, step=3, total_steps=4, tokens=9, seconds=1.0)
        return Outcome(run_dir="run", plan="p", ended=ended, predicted=REPORT, measured=None)

    monkeypatch.setattr("meshwright.run.train.train", train)
    assert main([*words, "--submit"]) == ExitCode.SAVED
    assert asked[0]["stop_after"] == 3600.0
    assert "step 3 of 4 is done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--on", "slrum"], "'slrum' is no place to launch on; did you mean 'slurm'?"),
        (["--on", "slurm", "--hosts", "a,b"], "--on slurm has no use of it; it is of --on ssh"),
        (["--on", "ssh", "--hosts", "a"], "1 host for the plan's 2 nodes"),
        (["--on", "kubernetes", "--run", "/mnt/x"], "--image: --on kubernetes needs it"),
        (["--on", "slurm", "--time", "soon"], "'soon' is not a number"),
        (["--on", "slurm", "--time", "20m"], "minutes are min: 20min"),
        (["--on", "slurm", "--time", "0s"], "0s is no time to train in"),
        (["--on", "slurm", "--follow"], "only a job that is handed to SLURM is followed"),
        (["--on", "slurm", "--time", "30s"], "no time is left to train"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    words: list[str], says: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(plan), *words]) == ExitCode.USAGE
    assert says in capsys.readouterr().err
