"""Faults from outside: done at their moments, recovered from, and counted; nothing is lost by them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from meshwright.catalog.failure_mix import EVEN, LLAMA3
from meshwright.cli import main
from meshwright.lab.fabric import unfit
from meshwright.run.chaos.chaos import chaos
from meshwright.run.chaos.compare import compare, losses
from meshwright.run.chaos.launches import Launch
from meshwright.run.chaos.soak import draw
from meshwright.run.chaos.strike import Done, Hang, Slow, Standing
from meshwright.run.chaos.supervise import MOST_IN_VAIN, Supervisor, Trial, _Open, _Progress
from meshwright.run.chaos.watch import Watch
from meshwright.run.chaos.words import first_named, is_told, told_of
from meshwright.run.elastic.epochs import epochs_path
from meshwright.run.files import write_json
from meshwright.spec.chaos import LaunchEnd
from meshwright.spec.errors import ConfigError, ExitCode
from meshwright.spec.faults import At, Fault, FaultKind, Moment, check_faults, read_fault
from meshwright.spec.goodput import Mark
from meshwright.spec.goodput import Moment as Marked
from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.job import CheckpointSpec, ElasticSpec, EvaluationSpec
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Sharding
from meshwright.train.observe.timekeeper import note
from meshwright.train.observe.whereabouts import Section, path_of
from tests.run import fake_run
from tests.run.runs import BATCH, design
from tests.support.designs import Layout

STEPS = 120
SHARDED = Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS)


def quiet(line: str) -> None:
    """Nobody watches a test."""


def fake(run_dir: Path, *words: str, **faults: list[str]) -> Trial:
    """What becomes of a run without torch."""
    read = [read_fault(FaultKind(name.replace("_", "-")), text) for name, texts in faults.items() for text in texts]
    command = [sys.executable, fake_run.__file__, str(run_dir), *words]
    return Supervisor(run_dir, lambda _goes_on: command, read, 2, run_dir / "chaos", quiet).run()


def test_faults_come_when_they_should_and_what_they_cost_is_counted(tmp_path: Path) -> None:
    trial = fake(
        tmp_path / "run",
        hang=["rank=1,seconds=0.3@step=3"],
        kill=["rank=1@step=8", "rank=all@step=26"],
        preempt=["@step=14"],
        disk_full=["@step=20"],
        slow=["rank=1,factor=4,steps=3@step=32"],
    )
    assert (trial.gave_up, trial.missed) == ("", ())
    hung, lost, asked, full, gone, slowed = trial.struck
    assert [each.fault.moment.step for each in trial.struck] == [3, 8, 14, 20, 26, 32]
    assert all(each.recovered and each.step >= each.fault.moment.step for each in trial.struck)
    assert [each.words for each in (hung, slowed)] == ["", ""]
    assert [each.found_seconds for each in (hung, slowed)] == [None, None]
    assert hung.back_seconds is not None
    assert hung.back_seconds >= 0.3
    assert lost.words == "rank 1 was lost"
    assert asked.words == "it was asked to stop, and saved"
    assert full.words == "nothing more can be written: File too large"
    assert gone.words == "it was killed (signal 9)"
    assert [end.exit_code for end in trial.launches] == [5, 75, 4, -9, 0]
    assert [each.launch for each in trial.struck] == [1, 1, 2, 3, 4, 5]
    assert asked.undone_steps == 0
    assert 0 <= lost.undone_steps <= fake_run.SAVED_EVERY
    assert sorted(losses(tmp_path / "run")) == list(range(1, fake_run.STEPS + 1))


@pytest.mark.parametrize("fault", ["kill=rank=0@step=8", "kill=rank=all@step=8", "corrupt=@step=8", "preempt=@step=8"])
def test_steps_that_rank_0_had_done_unseen_are_no_recovery(fault: str) -> None:
    """Steps of a millisecond: what its process wrote last may be steps after what was seen when it was killed."""
    kind, _, text = fault.partition("=")
    struck = _Open(fault=read_fault(FaultKind(kind), text), strike=Done(), at=0.0, step=8, launch=1, process=77)
    watched = Supervisor(Path("run"), lambda _goes_on: [], (), 2, Path("logs"), quiet)
    watched._progress = _Progress(process=77, first=1, step=12)
    assert not watched._is_back(struck)
    watched._progress = _Progress(process=78, first=6, step=7)
    assert watched._is_back(struck)
    other = replace(struck, fault=read_fault(FaultKind.KILL, "rank=1@step=8"))
    watched._progress = _Progress(process=77, first=1, step=12)
    assert watched._is_back(other), "an elastic run goes on without rank 1"


def test_what_hangs_goes_on_when_nothing_holds_it_any_more() -> None:
    """A slow rank is stopped and let go on all the time, and not where it hangs as well."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        process, standing = [psutil.Process(child.pid)], Standing()
        slow = Slow(process, standing, began=0.0, factor=2.0, until_step=9)
        hangs = [Hang(process, standing, until=until) for until in (3.0, 5.0, None)]
        assert slow.lasts(now=0.04, step=1)
        assert slow.lasts(now=0.06, step=1)
        while process[0].status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert [hang.lasts(now=4.0, step=1) for hang in hangs] == [False, True, True]
        assert not slow.lasts(now=4.0, step=9)
        assert process[0].status() == psutil.STATUS_STOPPED
        assert [hang.lasts(now=6.0, step=9) for hang in hangs[1:]] == [False, True]
        assert process[0].status() == psutil.STATUS_STOPPED
        child.kill()
        child.wait()
        assert not hangs[2].lasts(now=7.0, step=9)


def test_what_asks_chaos_to_end_ends_its_launch(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from meshwright.run.chaos.launches import Launch
from meshwright.run.signals import interrupted_by_signals
with interrupted_by_signals(), Launch(["sleep", "600"], number=1, log=Path({str(tmp_path / "log")!r})) as launch:
    print(launch.process.pid, flush=True)
    time.sleep(600)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        launched = psutil.Process(int(process.stdout.readline()))
        process.terminate()
        assert "KeyboardInterrupt: SIGTERM" in process.communicate(timeout=60)[1]
    assert not launched.is_running()


def test_a_run_is_not_started_again_for_ever(tmp_path: Path) -> None:
    trial = fake(tmp_path / "broken", "broken", kill=["rank=0@step=8"])
    assert len(trial.launches) == MOST_IN_VAIN
    assert trial.gave_up == f"{MOST_IN_VAIN} launches in a row gained no step: it is broken"
    assert trial.missed == (Fault(kind=FaultKind.KILL, moment=Moment(step=8)),)
    trial = fake(tmp_path / "wrong", "wrong")
    assert (len(trial.launches), trial.gave_up) == (1, "no start would mend it: it is wrong")


def test_a_start_mends_signals_workers_and_disks_alone() -> None:
    codes = (*ExitCode, -9, -15)
    mended = [code for code in codes if LaunchEnd(number=1, seconds=1.0, exit_code=code, words="").is_mendable]
    assert mended == [ExitCode.ENVIRONMENT, ExitCode.WORKER, ExitCode.SAVED, ExitCode.INTERRUPTED, -9, -15]


def test_of_a_long_error_all_is_kept(tmp_path: Path) -> None:
    said = f"print('error: ' + 'word ' * 100); raise SystemExit({ExitCode.WORKER:d})"
    with Launch([sys.executable, "-c", said], number=1, log=tmp_path / "launch.log") as launch:
        ended = launch.ended()
    assert ended.exit_code == ExitCode.WORKER
    assert ended.words == ("word " * 100).strip()


def test_random_faults_are_those_of_their_seed() -> None:
    asked = {"faults": 400, "ranks": 4, "every_seconds": 10.0, "patience_seconds": 30.0}
    found = draw(LLAMA3, seed=3, can_cut=True, **asked)
    assert found == draw(LLAMA3, seed=3, can_cut=True, **asked)
    assert found != draw(LLAMA3, seed=4, can_cut=True, **asked)
    times = [fault.moment.seconds for fault in found]
    assert times == sorted(times)
    assert times[-1] / len(found) == pytest.approx(10.0, rel=0.2)
    for before, fault in pairwise(found):
        if fault.moment.at is At.START:
            assert before.kind in (FaultKind.KILL, FaultKind.CORRUPT, FaultKind.PREEMPT)
            assert before.moment.seconds == fault.moment.seconds
    share = sum(fault.kind is FaultKind.KILL for fault in found) / len(found)
    assert share == pytest.approx(sum(c.count for c in LLAMA3.causes if c.fault is FaultKind.KILL) / 419, abs=0.06)
    uncut = draw(EVEN, seed=3, can_cut=False, **asked)
    assert {fault.kind for fault in uncut} == set(FaultKind) - {FaultKind.PARTITION}
    check_faults(uncut, ranks=4, steps=1, kept=2, can_cut="no root")
    for never in (0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="at least one fault"):
            draw(EVEN, seed=0, can_cut=True, **{**asked, "every_seconds": never})


def test_curves_that_are_not_equal_are_told(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    for name, last in (("one", 0.25), ("other", 0.25 * (1 + 1e-6))):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "design.json", made)
        rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)] + [{"step": 4, "loss": last}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = compare(tmp_path / "one", tmp_path / "other")
    assert (found.steps, found.missing, found.same_state, found.tolerance) == (4, (), None, 1e-9)
    assert found.worst == pytest.approx(1e-6, rel=1e-3)
    assert not found.is_equal
    assert compare(tmp_path / "one", tmp_path / "one").is_equal
    (tmp_path / "other" / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, 'loss': 1.0})}\n")
    assert compare(tmp_path / "one", tmp_path / "other").missing == (2, 3, 4)


def test_what_is_wrong_is_told_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(design(tmp_path, steps=4).to_json())
    run = ["chaos", str(plan), "--run", str(tmp_path / "run")]
    assert main([*run, "--kill", "rank=3@step=9", "--hang", "rank=0@step=2"]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "there is no rank 3 in a plan of 1; 0 to 0, or all" in told
    assert "the run has 4 steps and ends before step 9" in told
    assert main([*run, "--kill", "rank=x@step=1", "--slow", "fctor=2@step=1", "--mix", "lama3"]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("error: ") == 3
    missing = design(tmp_path, steps=4)
    missing = replace(missing, job=replace(missing.job, data=replace(missing.job.data, tokenizer="not-there.json")))
    (tmp_path / "missing.json").write_text(missing.to_json())
    assert main(["chaos", str(tmp_path / "missing.json"), *run[2:], "--kill", "@step=2"]) == ExitCode.USAGE
    assert "not-there.json" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(run) == ExitCode.USAGE
    assert "no fault is asked for" in capsys.readouterr().err
    assert main([*run, "--simulate", "--faults", "3"]) == ExitCode.USAGE
    assert "not of faults one by one" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "design.json").write_text("{}")
    assert main([*run, "--kill", "@step=2"]) == ExitCode.USAGE
    assert "this directory holds a run already" in capsys.readouterr().err
    assert not (tmp_path / "run" / "chaos").exists()


def test_fields_that_are_set_are_those_of_the_run_and_of_its_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, launched = design(tmp_path, steps=4), list[list[str]]()
    plan = tmp_path / "plan.json"
    plan.write_text(made.to_json())
    run = ["chaos", str(plan), "--run", str(tmp_path / "run"), "--no-reference", "--set"]
    assert main([*run, "job.sed=1", "--kill", "@step=2"]) == ExitCode.USAGE
    assert "--set job.sed: unknown key; did you mean 'seed'?" in capsys.readouterr().err
    shorter = f"job.total_tokens={made.job.total_tokens // 2}"
    assert main([*run, shorter, "--kill", "@step=3"]) == ExitCode.USAGE
    assert "the run has 2 steps and ends before step 3" in capsys.readouterr().err

    def begin(supervisor: Supervisor) -> None:
        launched.extend(supervisor.command(goes_on) for goes_on in (False, True))
        raise ConfigError("enough")

    monkeypatch.setattr(Supervisor, "run", begin)
    assert main([*run, shorter, "--kill", "@step=1"]) == ExitCode.USAGE
    assert [words[-2:] for words in launched] == [["--set", shorter]] * 2


def test_a_process_that_has_another_rank_by_now_is_not_struck_as_the_one_before(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", str(tmp_path)], stdin=subprocess.PIPE) as process:
        watch = Watch(tmp_path, ranks=3)
        for rank, at in ((2, 1.0), (0, 2.0)):
            path = path_of(tmp_path, rank)
            path.parent.mkdir(exist_ok=True)
            told = {"step": 3, "section": Section.INPUT.value, "process": process.pid, "at": at}
            path.write_text(json.dumps(told))
        found = [watch.process(rank) for rank in range(3)]
        process.communicate(b"\n")
    assert [each.pid if each is not None else None for each in found] == [process.pid, None, None]


def test_plans_of_epochs_count_where_ranks_changed(tmp_path: Path) -> None:
    """A deterministic run that went on with fewer ranks has not the same bits."""
    made = design(tmp_path, steps=4, deterministic=True)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "design.json", made)
        note(tmp_path / name, Mark(what=Marked.LAUNCHED, at=1.0, plan="a"))
    assert compare(tmp_path / "one", tmp_path / "other").tolerance == 0.0
    path = epochs_path(tmp_path / "one")
    path.parent.mkdir()
    path.write_text('{"number": 0, "plan": "a"}\n{"number": 1, "pl')
    assert compare(tmp_path / "one", tmp_path / "other").tolerance == 0.0
    path.write_text('{"number": 0, "plan": "a"}\n{"number": 1, "plan": "b"}\n')
    assert compare(tmp_path / "one", tmp_path / "other").tolerance == 1e-9


def test_what_a_launch_said_is_of_the_faults_that_it_fits() -> None:
    killed = "rank 1 was killed (signal 9): the system or a person ended it (rank 0 waited in all_reduce 3)"
    hung = "rank 0 did not come to where the others waited: hung or stopped (rank 1 waited in all_reduce 3)"
    alone = "ranks 0 and 1 stood still in step 3, reading data for 4.6 s"
    full = "rank 0 ended with exit code 4 (it could not write why: is the disk of the run full?)"
    saved = "it was asked to stop, and saved"
    told = (killed, hung, alone, full, saved)
    texts = {
        (FaultKind.KILL, "rank=1@step=3"): (True, False, False, False, False),
        (FaultKind.KILL, "rank=0@step=3"): (False, False, False, False, False),
        (FaultKind.CORRUPT, "@step=3"): (False, False, False, False, False),
        (FaultKind.HANG, "rank=0@step=3"): (False, True, True, False, False),
        (FaultKind.HANG, "rank=1@step=3"): (False, False, True, False, False),
        (FaultKind.DISK_FULL, "@step=3"): (False, False, False, True, False),
        (FaultKind.PREEMPT, "@step=3"): (False, False, False, False, True),
        (FaultKind.SLOW, "rank=0@step=3"): (False, False, False, False, False),
    }
    faults = [read_fault(kind, text) for kind, text in texts]
    assert [tuple(is_told(fault, words) for words in told) for fault in faults] == list(texts.values())
    corrupt, kill = faults[2], faults[0]
    assert told_of([corrupt, kill], killed) == [False, True]
    assert told_of([corrupt], killed) == [True], "what else would it be of"
    assert told_of([corrupt, kill], "exit code 5") == [True, True]
    incidents = [
        Incident(trouble=Trouble.RANK, begun=1, at=9.0, what="rank 1 is slow", ranks=(1,)),
        Incident(trouble=Trouble.LOST, begun=1, at=8.0, what="rank 1 was killed (signal 9)", ranks=(1,)),
        Incident(trouble=Trouble.LOST, begun=2, at=10.0, what="rank 1 was killed (signal 9)", ranks=(1,)),
    ]
    named = first_named(kill, incidents, at=9.5)
    assert named is not None
    assert named.at == 10.0
    assert first_named(corrupt, incidents, at=9.5) is None
    assert first_named(kill, incidents, at=10.5) is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_elastic_run_loses_nothing_and_has_the_losses_of_one_that_kept_its_ranks(tmp_path: Path) -> None:
    steps = 360
    made = design(
        tmp_path,
        Layout(batch=12, shard=3, sharding=Sharding.PARAMETERS),
        steps=steps,
        deterministic=True,
        # What rounding does grows tenfold in twenty steps at a hundredth.
        optimizer=OptimizerSpec(learning_rate=1e-4),
        elastic=ElasticSpec(min_ranks=1, replacements=20),
        checkpoint=CheckpointSpec(every_steps=20, keep=3),
        evaluation=EvaluationSpec(every_steps=0, tokens=12 * 16),
        peer_timeout_seconds=10.0,
    )
    plan = tmp_path / "plan.json"
    plan.write_text(made.to_json())
    words = {
        FaultKind.KILL: ["rank=1@step=20", "rank=0@save,step=100"],
        FaultKind.HANG: ["rank=2@step=180"],
        FaultKind.PREEMPT: ["@step=260"],
    }
    faults = [read_fault(kind, text) for kind, texts in words.items() for text in texts]
    found = chaos(plan, run_dir=tmp_path / "run", faults=faults, against=tmp_path / "still", say=quiet)
    assert found.is_sound, (found.gave_up, found.missed, found.problems, found.curve)
    assert [each.exit_code for each in found.launches] == [ExitCode.SAVED, ExitCode.OK], found.launches
    assert found.read == steps * 12
    assert found.curve is not None
    assert found.curve.tolerance == 1e-9
    lost = [each for each in found.struck if each.fault.kind is not FaultKind.PREEMPT]
    assert all(each.found_seconds is None for each in lost), "it went on"
    assert [each.words.partition(":")[0] for each in lost] == [
        "rank 1 was killed (signal 9)",
        "rank 0 was killed (signal 9)",
        "rank 2 did not come to where the others waited",
    ]
    assert all(each.named_seconds is not None for each in lost)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_two_ranks_loses_nothing_by_any_fault(tmp_path: Path) -> None:
    """Bit by bit the undisturbed run: kills, hangs, spoilt checkpoints, a full disk, a cut network, a signal."""
    made = design(
        tmp_path,
        SHARDED,
        steps=STEPS,
        deterministic=True,
        checkpoint=CheckpointSpec(every_steps=10, keep=3),
        evaluation=EvaluationSpec(every_steps=0, tokens=BATCH * 16),
        peer_timeout_seconds=60.0,
    )
    plan = tmp_path / "plan.json"
    plan.write_text(made.to_json())
    words = {
        FaultKind.KILL: ["rank=1@step=15", "rank=0@save,step=25", "rank=1@start,step=22", "rank=all@step=75"],
        FaultKind.HANG: ["rank=1,seconds=1@step=35"],
        FaultKind.CORRUPT: ["part=tensors@step=45", "part=marker@step=55"],
        FaultKind.DISK_FULL: ["@save,step=65"],
        FaultKind.PREEMPT: ["@step=85"],
        FaultKind.SLOW: ["rank=0,factor=2,steps=10@step=92"],
        FaultKind.PARTITION: [] if unfit() else ["seconds=1@step=108"],
    }
    faults = [read_fault(kind, text) for kind, texts in words.items() for text in texts]
    found = chaos(plan, run_dir=tmp_path / "run", faults=faults, against=tmp_path / "still", say=quiet)
    assert found.is_sound, (found.gave_up, found.missed, found.problems, found.curve)
    assert found.read == STEPS * BATCH
    assert found.curve is not None
    assert (found.curve.worst, found.curve.same_state, found.curve.tolerance) == (0.0, True, 0.0)
    assert found.goodput is not None
    assert found.goodput.wall_seconds == pytest.approx(found.wall_seconds, rel=0.05)
    killed = next(each for each in found.struck if str(each.fault) == "kill rank=1@step=15")
    assert killed.words.startswith("rank 1 was killed (signal 9)")
    assert 0 < killed.undone_steps < 20
