"""Chaos that was interrupted goes on: nothing that it did, or that launches said, is lost."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from meshwright.cli import main
from meshwright.cli.chaos import _show
from meshwright.report import terminal_chaos
from meshwright.run.chaos.chaos import chaos
from meshwright.run.chaos.record import read_chaos
from meshwright.run.chaos.supervise import Supervisor
from meshwright.run.claim import claimed
from meshwright.run.files import read_json, write_json
from meshwright.run.outcome import Ended, ended_path
from meshwright.spec.chaos import Chaos, Curve, LaunchEnd, Struck
from meshwright.spec.errors import ConfigError, ExitCode
from meshwright.spec.faults import FaultKind, read_fault
from meshwright.train.events import Ending
from tests.run import fake_run
from tests.run.runs import BATCH, design
from tests.support.designs import Layout


def quiet(line: str) -> None:
    """Nobody watches a test."""


def _run_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose launches are those of the fake run."""
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "design.json", design(tmp_path, Layout(batch=BATCH, replicate=2), steps=fake_run.STEPS))
    command = [sys.executable, fake_run.__file__, str(run)]
    monkeypatch.setattr("meshwright.run.chaos.chaos._command", lambda *_, **_goes_on: command)
    return run


def _finished(run: Path) -> None:
    steps = fake_run.STEPS
    write_json(ended_path(run), Ended(ending=Ending.FINISHED, step=steps, total_steps=steps, tokens=1, seconds=1.0))


def test_chaos_that_was_interrupted_goes_on_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted as the second fault is done, then in the comparison, which the third one makes."""
    run, still = _run_without_torch(tmp_path, monkeypatch), tmp_path / "still"
    faults = [read_fault(FaultKind.KILL, f"rank=1@step={step}") for step in (8, 20, 36)]

    def interrupt(line: str) -> None:
        if line.endswith(str(faults[1])):
            raise KeyboardInterrupt

    def interrupted(run_dir: Path, _against: Path, **_: object) -> Path:
        _finished(run_dir)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chaos(run, run_dir=run, faults=faults, against=still, say=interrupt)
    kept = read_chaos(run)
    assert kept is not None
    assert [(each.fault, each.recovered) for each in kept.struck] == [(faults[0], True), (faults[1], False)]
    assert kept.missed == (faults[2],)
    assert (kept.interrupted, kept.is_sound) == (True, False)
    with pytest.raises(ConfigError, match="chaos was done to this run before"):
        chaos(run, run_dir=run, faults=faults, against=None, say=quiet)
    monkeypatch.setattr("meshwright.run.chaos.chaos._undisturbed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chaos(run, run_dir=run, faults=(), against=still, say=quiet)
    kept = read_chaos(run)
    assert kept is not None
    assert [(each.fault, each.recovered) for each in kept.struck] == [(fault, True) for fault in faults]
    assert (kept.struck[1].launch, kept.missed, kept.interrupted) == (2, (), True)
    logs = [log.name for log in sorted((run / "chaos").iterdir())]
    assert logs == [f"launch-{each.number:03d}.log" for each in kept.launches] == _logs(4)
    monkeypatch.setattr("meshwright.run.chaos.chaos._undisturbed", lambda run_dir, _against, **_: run_dir)
    told = chaos(run, run_dir=run, faults=(), against=still, say=quiet)
    assert (told.struck, told.launches, told.interrupted) == (kept.struck, kept.launches, False)
    assert told.curve is not None
    assert told == read_chaos(run)
    assert read_json(run / "chaos.json")["sound"] is told.is_sound


def _logs(many: int) -> list[str]:
    return [f"launch-{number:03d}.log" for number in range(1, many + 1)]


def test_what_launches_of_before_said_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "chaos"
    logs.mkdir(parents=True)
    (logs / "launch-007.log").write_text("said before")
    command = [sys.executable, fake_run.__file__, str(tmp_path / "run")]
    trial = Supervisor(tmp_path / "run", lambda _goes_on: command, (), 2, logs, quiet).run()
    assert [each.number for each in trial.launches] == [8]
    assert (logs / "launch-007.log").read_text() == "said before"
    assert (logs / "launch-008.log").is_file()


def test_faults_whose_moment_is_over_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run_without_torch(tmp_path, monkeypatch)
    whole = SimpleNamespace(checkpoint=SimpleNamespace(step=20))
    monkeypatch.setattr("meshwright.run.chaos.chaos.newest", lambda _directory: whole)
    asked = ["chaos", str(run), "--no-reference", "--kill", "rank=1@step=20", "--hang", "@save,step=8"]
    assert main([*asked, "--preempt", "@step=21"]) == ExitCode.USAGE
    told = capsys.readouterr().err
    for fault in ("kill rank=1@step=20", "hang rank=0@save,step=8"):
        assert f"--{fault}: the run goes on from step 20, and that moment is over; a later step" in told
    assert "preempt" not in told
    _finished(run)
    for late in ("@step=45", "@seconds=1"):
        assert main(["chaos", str(run), "--kill", late]) == ExitCode.USAGE
        assert "the run is finished, and no fault can come" in capsys.readouterr().err
    assert not (run / "chaos").exists()


def test_what_is_of_a_simulated_fleet_is_refused_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    write_json(plan, design(tmp_path, steps=4))
    asked = ["chaos", str(plan), "--run", str(tmp_path / "run"), "--faults", "1"]
    fleet = {"--devices": "100", "--days": "54", "--spares": "0", "--repair-hours": "24"}
    assert main([*asked, *(word for pair in fleet.items() for word in pair)]) == ExitCode.USAGE
    told = capsys.readouterr().err
    for option in fleet:
        assert f"{option}: is of a simulated fleet; leave it out, or simulate a fleet with --simulate" in told
    assert not (tmp_path / "run").exists()


def test_what_is_of_a_run_is_refused_of_a_simulated_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    write_json(plan, design(tmp_path, steps=4))
    trained = {"--run": str(tmp_path / "run"), "--every": "5", "--against": str(tmp_path / "other")}
    asked = ["chaos", str(plan), "--simulate", *(word for pair in trained.items() for word in pair)]
    assert main([*asked, "--no-reference"]) == ExitCode.USAGE
    told = capsys.readouterr().err
    for option in (*trained, "--no-reference"):
        assert f"{option}: is of a run that is trained; leave it out, or --simulate" in told


def test_a_seed_below_zero_is_refused_of_a_fleet_and_of_random_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    write_json(plan, design(tmp_path, steps=4))
    failing = ["--simulate", "--set", "cluster.groups.0.device.hours_between_failures=50000"]
    for asked in (failing, ["--run", str(tmp_path / "run"), "--faults", "1"]):
        assert main(["chaos", str(plan), "--seed", "-5", *asked]) == ExitCode.USAGE
        assert "--seed: -5 is below 0; 0, or more" in capsys.readouterr().err


def test_a_launch_that_would_be_refused_is_not_begun_and_what_does_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    write_json(plan, design(tmp_path, steps=4))
    monkeypatch.setattr(Supervisor, "run", lambda _: pytest.fail("a launch was begun"))
    asked = ["chaos", str(plan), "--run", str(tmp_path / "run"), "--kill", "@step=2", "--set"]
    assert main([*asked, "job.sequence_length=4096", "--set", "job.spike.window=64"]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "warning: --set spike.window: does nothing (spike.policy is ignore)" in told
    assert "is not the job's 4,096" in told
    assert "page:" not in told
    assert not (tmp_path / "run").exists()


def test_a_simulation_refuses_what_its_plan_is_not_and_tells_what_it_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    write_json(plan, design(tmp_path, steps=4))
    failing = "cluster.groups.0.device.hours_between_failures=1000"
    asked = ["chaos", str(plan), "--simulate", "--days", "1", "--set", failing, "--set"]
    for wrong, why in (
        ("job.sequence_length=4096", "is not the job's 4,096"),
        ("job.constraints.fix.tensor=4", "refused by job.constraints.fix.tensor"),
        ("job.precision=bf16", "is not the job's bf16"),
        ("spike.window=64", "--set spike.window: unknown key"),
    ):
        assert main([*asked, wrong]) == ExitCode.USAGE
        assert why in capsys.readouterr().err
    assert main([*asked, "job.seed=3", "--set", "job.checkpoint.every_steps=2"]) == ExitCode.OK
    told = capsys.readouterr().err
    assert "--set job.seed=3: changes nothing of the step, its checkpoints and failures" in told
    assert "every_steps=2: changes nothing" not in told
    assert f"{failing}: changes nothing" not in told


def test_a_page_is_named_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replace(found_of(), run=str(tmp_path / "a run"))
    _show(found, as_json=False)
    assert "page:" not in capsys.readouterr().err
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "design.json").write_text("{}")
    _show(found, as_json=False)
    assert f"page: meshwright report '{tmp_path / 'a run'}'" in capsys.readouterr().err


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "design.json", design(tmp_path, steps=4))
    with claimed(run):
        assert main(["chaos", str(run), "--kill", "@step=2"]) == ExitCode.USAGE
    assert f"goes on already (process {os.getpid()} on " in capsys.readouterr().err
    assert {path.name for path in run.iterdir()} == {"design.json", "claim-0"}


def found_of(*struck: Struck) -> Chaos:
    """What became of a run of two launches."""
    ends = tuple(LaunchEnd(number=number, seconds=1.0, exit_code=0, words="") for number in (1, 2))
    return Chaos(
        run="run",
        plan="",
        struck=struck,
        missed=(),
        launches=ends,
        wall_seconds=1.0,
        undisturbed_seconds=1.0,
        undisturbed_steps=1,
        gave_up="",
        goodput=None,
        read=8,
        problems=(),
        curve=None,
    )


def test_what_the_run_said_is_whole_and_no_fault_is_broken_in_eighty_columns() -> None:
    said = "rank 1 was killed (signal 9) " + "and so on " * 40 + "to its end"
    fault = read_fault(FaultKind.KILL, "rank=1@step=15")
    struck = Struck(fault=fault, at_seconds=1.0, step=15, launch=1, recovered=True, words=said, found_seconds=2.0)
    console = Console(width=80, color_system=None, highlight=False)
    with console.capture() as captured:
        for view in terminal_chaos.chaos(found_of(struck)):
            console.print(view)
    shown = captured.get()
    assert " ".join(said.split()) in " ".join(shown.split())
    assert [line for line in shown.splitlines() if line.startswith(f"{fault} ") and line.split()[-1] == "0"]


def test_one_fault_is_told_as_one() -> None:
    struck = Struck(fault=read_fault(FaultKind.KILL, "@step=3"), at_seconds=1.0, step=3, launch=1, recovered=True)
    found = found_of(struck)
    heading = next(iter(terminal_chaos.chaos(found)))
    assert "1 fault in run, 2 launches" in str(heading)
    assert terminal_chaos.verdicts(found)[0] == "1 of 1 fault was recovered from"
    apart = Curve(against="RUN", steps=4, worst=1.24e-07, tolerance=1e-4, missing=(), same_state=None)
    assert terminal_chaos.verdicts(replace(found, curve=apart))[-1] == (
        "losses of 4 steps are relatively at most 1.2e-07 apart from those of RUN"
    )
    assert terminal_chaos.verdicts(replace(found, struck=(struck, struck)))[0] == "2 of 2 faults were recovered from"
