"""`meshwright train` and `generate`: what is said before and after a run, and of what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.run.choose import default_run_dir
from meshwright.run.files import load_design
from meshwright.run.outcome import Ended, Outcome
from meshwright.run.screen import Screen
from meshwright.spec.errors import ExitCode
from meshwright.spec.report import Line, Report
from meshwright.train.events import Ending
from tests.run.runs import design

REPORT = Report(
    plan="p", step=Line(name="step"), memory=(), tokens_per_step=1, devices=1, model_flops=1.0, peak_flops=None
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(design(tmp_path, steps=4).to_json())
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What the command asked of the run, which trains nothing and is stopped by a signal."""
    calls: list[dict[str, object]] = []

    def train(made: object, **options: object) -> Outcome:
        calls.append({"design": made, **options})
        ended = Ended(ending=Ending.SIGNALLED, step=3, total_steps=4, tokens=9, seconds=1.0)
        return Outcome(run_dir=str(options["run_dir"]), plan="p", ended=ended, predicted=REPORT, measured=None)

    monkeypatch.setattr("meshwright.run.train.train", train)
    return calls


def test_a_plan_is_run_and_a_signal_is_exit_75(
    plan: Path, asked: list[dict[str, object]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main(["train", str(plan), "--run", str(tmp_path / "run"), "--steps", "3", "--set", "job.seed=7"])
    assert code == ExitCode.SAVED
    (call,) = asked
    assert call["steps"] == 3
    assert call["design"].job.seed == 7  # type: ignore[attr-defined]  # a Design
    printed = capsys.readouterr()
    assert "step 3 of 4 is done and saved" in printed.out
    assert f"go on:     meshwright train --run {tmp_path / 'run'} --resume" in printed.out
    assert "1 device" in printed.err


@pytest.mark.parametrize(
    ("words", "screen"), [((), Screen.NORMAL), (("-q",), Screen.QUIET), (("--verbose",), Screen.VERBOSE)]
)
def test_a_run_shows_as_much_as_was_asked(
    words: tuple[str, ...],
    screen: Screen,
    plan: Path,
    asked: list[dict[str, object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*words, "train", str(plan)]) == main(["train", str(plan), *words]) == ExitCode.SAVED
    assert [call["screen"] for call in asked] == [screen, screen]
    printed = capsys.readouterr()
    assert printed.out.count("step 3 of 4 is done and saved") == 2
    assert ("1 device" in printed.err) == (screen is not Screen.QUIET)


@pytest.mark.usefixtures("asked")
def test_json_is_one_document(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(plan), "--json"]) == ExitCode.SAVED
    document = json.loads(capsys.readouterr().out)
    assert document["ended"]["ending"] == "signalled"
    assert document["run_dir"].startswith("runs/tiny-")


@pytest.mark.usefixtures("asked")
def test_what_does_nothing_in_the_job_of_a_plan_is_warned_of(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(plan), "--set", "job.spike.window=64"]) == ExitCode.SAVED
    assert "warning: --set spike.window: does nothing (spike.policy is ignore)" in capsys.readouterr().err


def test_resume_needs_no_plan(plan: Path, asked: list[dict[str, object]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "design.json").write_text(plan.read_text())
    main(["train", "--run", str(run), "--resume"])
    assert asked[0]["resume"] is True
    assert asked[0]["run_dir"] == run


def test_a_run_that_is_not_there_is_not_gone_on_with(
    asked: list[dict[str, object]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "--run", str(tmp_path / "none"), "--resume"]) == ExitCode.USAGE
    assert f"{tmp_path / 'none'}: no such run" in capsys.readouterr().err
    assert not asked


@pytest.mark.parametrize("command", [["train"], ["launch", "--on", "local"]], ids=lambda words: words[0])
def test_a_run_in_place_of_a_plan_goes_on_by_its_own_name_alone(
    command: list[str],
    plan: Path,
    asked: list[dict[str, object]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my run"
    run.mkdir()
    (run / "design.json").write_text(plan.read_text())
    assert main([*command, "my run", "--resume"]) == ExitCode.USAGE
    assert "my run: is a run, given as a plan; --resume goes on with the run that --run names; use --run 'my run'" in (
        " ".join(capsys.readouterr().err.split())
    )
    own = default_run_dir(load_design(plan))
    own.mkdir(parents=True)
    (own / "design.json").write_text(plan.read_text())
    assert main(["train", str(own), "--resume"]) == ExitCode.SAVED
    assert [call["run_dir"] for call in asked] == [own]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "nothing to train is named"),
        (["train", "PLAN", "--model", "llama-5m"], "a plan has its model, cluster, job and data already"),
        (["train", "PLAN", "--cluster", "local:3"], "a plan has its model, cluster, job and data already"),
        (["train", "--run", "PLAN", "--resume", "--cluster", "local:3"], "go on with another plan: train PLAN --run"),
        (["train", "PLAN", "--measure"], "--measure: a plan that is there stays as it is"),
        (["train", "PLAN", "--set", "job.sed=1"], "did you mean 'seed'"),
        (["train", "nowhere.json"], "nowhere.json"),
        (["generate", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_one_message(
    plan: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(plan) if word == "PLAN" else word for word in arguments])
    assert code == ExitCode.USAGE
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_run_whose_lines_nobody_reads_goes_on_to_its_end(plan: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    entry = f"{sys.executable} -c 'import sys; from meshwright.cli import main; sys.exit(main())'"
    command = f"set -o pipefail; {entry} train {plan} --run {run} 2>&1 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    assert json.loads((run / "outcome.json").read_text())["step"] == 4


def test_a_quiet_run_prints_its_results_and_keeps_its_lines(
    plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(plan), "--run", str(run), "--quiet"]) == ExitCode.OK
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "step 4 of 4 is done and saved" in printed.out
    kept = "".join(path.read_text() for path in (run / "logs").rglob("stderr.log"))
    assert "step 4/4" in kept
