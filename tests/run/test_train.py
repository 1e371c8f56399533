"""Real runs of a tiny model on real worker processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from meshwright.cli import main
from meshwright.report import diagnose
from meshwright.run.audit import audit
from meshwright.run.files import load_design, write_json
from meshwright.run.generate import generate
from meshwright.run.outcome import Outcome
from meshwright.run.resume import is_done
from meshwright.run.train import train
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, WorkerFailed
from meshwright.spec.exchange import Exchange, TokenLayout
from meshwright.spec.goodput import Goodput, Spent
from meshwright.spec.job import CheckpointSpec, DataSpec, Interval, Source
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Sharding
from meshwright.train.checkpoint.manifest import Manifest, read_manifest, seal, write_manifest
from meshwright.train.events import Ending
from meshwright.train.observe.timekeeper import goodput_of
from tests.run.runs import BATCH, after_steps, ask_to_stop, design, failing, losses, rows, validation, worker_of
from tests.support.designs import Layout

STEPS = 24
SECRET = "geheim-4711"
SHARDED = Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS)
PIPELINED = Layout(batch=BATCH, pipeline=2)


def quiet(line: str) -> None:
    """Nobody watches a test."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device from its first step to its last."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRET)
        patch.setattr(sys, "argv", ["meshwright", "train", "--api-key", SECRET, f"https://me:{SECRET}@host"])
        outcome = train(design(folder, steps=STEPS), run_dir=folder / "run", say=quiet)
    assert outcome.ended.ending is Ending.FINISHED
    assert outcome.exit_code is ExitCode.OK
    return folder


def test_a_run_leaves_what_others_read(whole: Path) -> None:
    run = whole / "run"
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert sorted(validation(run)) == list(range(4, STEPS + 1, 4))
    assert losses(run)[STEPS] < losses(run)[1]
    first = rows(run)[0]
    names = "step tokens loss grad_norm learning_rate seconds tokens_per_second mfu memory_bytes of_prediction ettr"
    assert list(first) == names.split()
    assert load_design(run / "design.json").plan == design(whole, steps=STEPS).plan
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["useful_seconds"] < summary["wall_seconds"]
    for name in ("predicted.json", "measured.json", "environment.json", "tokenizer.json", "spans/rank-00000.jsonl"):
        assert (run / name).stat().st_size > 0
    assert (run / "checkpoints" / f"step-{STEPS:08d}" / "COMMITTED").exists()
    assert not (run / "logs").exists()


def test_a_secret_of_the_environment_or_the_command_is_nowhere_in_a_run(whole: Path) -> None:
    files = [path for path in (whole / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    told = json.loads((whole / "run" / "environment.json").read_text())["command"]
    assert told == ["meshwright", "train", "--api-key", "***", "https://***@host"]


class Listening(threading.Thread):
    """Addresses at which this process and what it started listen, until it is told that it is enough."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.found, self.enough = self._now(), set[str](), threading.Event()

    def run(self) -> None:
        while not self.enough.wait(0.2):
            self.found |= self._now() - self.before

    def _now(self) -> set[str]:
        found = set[str]()
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with suppress(psutil.Error):
                sockets = process.net_connections("inet")
                found |= {f"{each.laddr.ip} {each.laddr.port}" for each in sockets if each.status == "LISTEN"}
        return found


@pytest.mark.slow
def test_two_context_ranks_train_as_one_device_does(whole: Path, tmp_path: Path) -> None:
    """The losses of its first steps and its first validation, documents and all; and nothing else hears of it."""
    layout = Layout(batch=BATCH, context=2, exchange=Exchange(layout=TokenLayout.BALANCED))
    listening = Listening()
    listening.start()
    outcome = train(design(whole, layout, steps=4), run_dir=tmp_path / "run", say=quiet)
    assert outcome.ended.ending is Ending.FINISHED
    expected = losses(whole / "run")
    assert losses(tmp_path / "run") == pytest.approx({step: expected[step] for step in range(1, 5)}, abs=1e-9)
    assert validation(tmp_path / "run")[4] == pytest.approx(validation(whole / "run")[4], abs=1e-9)
    listening.enough.set()
    assert {each.split()[0] for each in listening.found} == {"127.0.0.1"}


def test_text_is_sampled_from_the_checkpoint_the_same_for_a_seed(whole: Path) -> None:
    once = generate(whole / "run", "3 times", tokens=12, seed=5)
    assert once.text.startswith("3 times")
    assert generate(whole / "run", "3 times", tokens=12, seed=5) == once
    with pytest.raises(ConfigError, match="ask for at least one"):
        generate(whole / "run", tokens=0)


def accounts_for(wall_seconds: float, goodput: Goodput, *, steps: int) -> None:
    """Its kinds sum to what another clock took around all launches, and its steps are those that lasted."""
    assert goodput.wall_seconds == pytest.approx(wall_seconds, rel=0.005)
    assert sum(goodput.seconds.values()) == pytest.approx(wall_seconds, rel=0.005)
    assert goodput.steps == steps


def spoil(checkpoint: Path) -> None:
    """A byte of the weights is another; sizes are as they were."""
    file = next(path for path in sorted(checkpoint.iterdir()) if path.suffix == ".tensors")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def of_step(step: int, checkpoint: Path) -> Path:
    """A copy of a checkpoint as if step `step` had been saved."""
    made = checkpoint.with_name(f"step-{step:08d}")
    shutil.copytree(checkpoint, made)
    manifest = read_manifest(made)
    assert isinstance(manifest, Manifest)
    files = {name: replace(record, step=step) for name, record in manifest.files.items()}
    write_manifest(made, replace(manifest, step=step, files=files))
    seal(made)
    return made


@pytest.mark.slow
def test_ranks_that_lie_on_other_devices_train_what_one_device_does(whole: Path, tmp_path: Path) -> None:
    """A placement that turns the ranks of one pipeline round, which no group of ascending ranks can follow."""
    made = design(whole, Layout(batch=BATCH, pipeline=3), steps=STEPS)
    turned = replace(made, plan=replace(made.plan, placement=(2, 0, 1)))
    run = tmp_path / "run"
    train(turned, run_dir=run, steps=4, say=quiet)
    assert losses(run) == pytest.approx({step: losses(whole / "run")[step] for step in range(1, 5)}, rel=1e-9)


def test_a_newer_checkpoint_that_is_spoilt_is_passed_over_and_said(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    good = run / "checkpoints" / f"step-{STEPS:08d}"
    newer = of_step(STEPS + 1, good)
    spoil(newer)
    assert main(["generate", str(run), "--tokens", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == STEPS
    assert json.loads(out)["passed_over"][0]["where"] == str(newer)
    assert f"the checkpoint of step {STEPS} is read; a newer one is passed over: {newer}: corrupt" in err
    shutil.rmtree(newer)
    assert generate(run, tokens=3).passed_over == ()


def test_a_spoilt_checkpoint_that_a_restart_passed_over_is_told_ever_after(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    newer = of_step(STEPS + 2, run / "checkpoints" / f"step-{STEPS:08d}")
    spoil(newer)
    train(design(whole, steps=STEPS + 2), run_dir=run, resume=True, say=quiet)
    said = f"checkpoint {STEPS + 2} is corrupt"
    goodput = goodput_of(run)
    assert goodput is not None
    assert re.search(f"{said} .the checksum of .*, passed over", goodput.interruptions[-1].why)
    text = "\n".join(diagnose(run).lines())
    assert f"corrupt checkpoint  from step {STEPS}, once: {said}, passed over" in text
    assert "known by  the checksum of" in text
    found = audit(run, cache=tmp_path / "cache")
    assert found.unfit == (), "another was saved in its place"
    assert [each.what for each in found.passed_over] == [f"{said}, passed over"]


def test_a_run_whose_only_checkpoint_is_spoilt_does_not_begin_again(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    spoil(run / "checkpoints" / f"step-{STEPS:08d}")
    with pytest.raises(WorkerFailed, match=r"corrupt \(the checksum of .* is not the one that was saved, from byte 0"):
        train(design(whole, steps=STEPS + 4), run_dir=run, resume=True, say=quiet)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def stopped(whole: Path) -> Outcome:
    """A deterministic run on two ranks in `moved`, which a signal ended on its way."""
    sender = after_steps(whole / "moved", 3, ask_to_stop)
    (whole / "began").write_text(str(time.time()))
    sharded = design(whole, SHARDED, steps=STEPS, deterministic=True)
    outcome = train(sharded, run_dir=whole / "moved", say=quiet)
    sender.join()
    return outcome


def test_a_signal_saves_and_another_plan_goes_on_as_if_nothing_had_happened(whole: Path, stopped: Outcome) -> None:
    run = whole / "moved"
    assert stopped.exit_code is ExitCode.SAVED
    assert stopped.ended.ending is Ending.SIGNALLED
    assert 3 <= stopped.ended.step < STEPS
    assert (run / "checkpoints" / f"step-{stopped.ended.step:08d}" / "COMMITTED").exists()

    (run / "decision.json").write_text("{}")
    (run / "measured.json").write_text("{}")
    (run / "spans").mkdir(exist_ok=True)
    (run / "spans" / "rank-00099.jsonl").write_text("")
    finished = train(design(whole, PIPELINED, steps=STEPS), run_dir=run, resume=True, say=quiet)
    wall = time.time() - float((whole / "began").read_text())
    assert finished.ended.ending is Ending.FINISHED
    assert not (run / "decision.json").exists()
    assert not (run / "spans" / "rank-00099.jsonl").exists()
    assert finished.measured is not None
    assert finished.measured.plan == design(whole, PIPELINED, steps=STEPS).plan.digest()
    expected = losses(whole / "run")
    assert losses(run) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert validation(run) == pytest.approx(validation(whole / "run"), rel=1e-9, abs=1e-9)
    found, once = (audit(folder, cache=whole / "cache") for folder in (run, whole / "run"))
    assert (found.step, found.read, found.problems) == (STEPS, STEPS * BATCH, ())
    assert found.sums == once.sums
    assert found.checkpoints == (STEPS, stopped.ended.step)
    assert finished.goodput is not None
    accounts_for(wall, finished.goodput, steps=STEPS)
    (moved,) = finished.goodput.interruptions
    assert set(moved.seconds) == {Spent.REPLAN}
    assert (moved.step, moved.why, moved.undone_steps) == (stopped.ended.step, "it was asked to stop", 0)
    taken = sum(finished.goodput.seconds[kind] for kind in (Spent.USEFUL, Spent.DATA, Spent.SLOW))
    assert taken == pytest.approx(sum(row["seconds"] for row in rows(run) if "loss" in row), rel=0.1)


def test_what_a_run_did_not_read_as_it_says_is_told(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    made = design(whole, steps=STEPS)
    assert main(["audit", str(tmp_path / "run"), "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    (passes,), (stored,) = told["passes"], told["stored"]
    (weights,) = (tmp_path / "run" / "checkpoints").glob("*/*.tensors")
    assert stored == {"step": STEPS, "written_bytes": weights.stat().st_size, "referred_bytes": 0}
    assert passes["whole"] * passes["windows"] + passes["begun"] == STEPS * BATCH
    write_json(tmp_path / "run" / "design.json", replace(made, job=replace(made.job, seed=7)))
    assert main(["audit", str(tmp_path / "run")]) == ExitCode.NO_PLAN
    assert "NOT PROVEN  " in capsys.readouterr().out
    weights.write_bytes(bytes(weights.stat().st_size))
    assert main(["audit", str(tmp_path / "run")]) == ExitCode.USAGE
    assert f"in {weights.name} is not the one that was saved" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("stopped")
def test_a_killed_worker_is_told_and_goes_on_from_a_checkpoint_as_often_as_failures_ask_for(
    whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its steps are those of the same plan to the last bit, and its time is accounted for."""
    run, began = whole / "killed", time.time()
    saving = CheckpointSpec(interval=Interval.GOODPUT, asynchronous=False)
    made = design(whole, SHARDED, steps=4000, deterministic=True, checkpoint=saving)
    made = replace(made, cluster=failing(made.cluster, hours=2e-4))
    killer = after_steps(run, 6, lambda: worker_of(1).send_signal(signal.SIGKILL))
    with pytest.raises(WorkerFailed, match=r"rank 1 was killed \(signal 9\): .*predicted .* a rank") as caught:
        train(made, run_dir=run, say=quiet)
    killer.join()
    assert caught.value.exit_code is ExitCode.WORKER
    assert "Traceback" not in str(caught.value)
    ours, theirs = losses(run), losses(whole / "moved")
    assert [ours[step] for step in (1, 2, 3)] == [theirs[step] for step in (1, 2, 3)]

    again = train(made, run_dir=run, resume=True, steps=2, say=quiet)
    assert again.goodput is not None
    (killed,) = again.goodput.interruptions
    accounts_for(time.time() - began, again.goodput, steps=killed.step + 2)
    assert 0 < killed.step == len(ours) - killed.undone_steps
    assert killed.why.startswith("rank 1 was killed (signal 9)")
    assert set(killed.seconds) - {Spent.UNDONE} == {Spent.FAILING, Spent.DOWN, Spent.RESTART}
    assert again.goodput.failures == 1
    told = capfd.readouterr().err
    assert len(re.findall(r"a checkpoint every \d+ steps?: saves stall .* as predicted, one failure in", told)) == 2


def test_a_loss_that_is_not_finite_names_the_step_and_saves_the_one_before(whole: Path) -> None:
    wild = OptimizerSpec(learning_rate=1e200, clip_norm=None)
    with pytest.raises(WorkerFailed, match=r"of step (\d+) is (nan|inf).*step \d+ is saved") as caught:
        train(design(whole, steps=STEPS, optimizer=wild), run_dir=whole / "wild", say=quiet)
    assert caught.value.exit_code is ExitCode.WORKER
    assert "Traceback" not in str(caught.value)


def test_a_run_that_is_done_stays_as_it_is_by_its_plan_and_by_another(whole: Path) -> None:
    run = whole / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for layout in (None, SHARDED):
        said: list[str] = []
        outcome = train(design(whole, layout, steps=STEPS), run_dir=run, resume=True, say=said.append)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        assert said == [str(is_done(run, design(whole, steps=STEPS)))]
        assert outcome.exit_code is ExitCode.OK
        assert outcome.plan == design(whole, steps=STEPS).plan.digest()
        assert outcome.ended.loss == losses(run)[STEPS]
        assert outcome.measured is not None
        assert outcome.goodput is not None


def test_a_directory_that_holds_a_run_is_not_written_over(whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume"):
        train(design(whole, steps=STEPS), run_dir=whole / "run", say=quiet)


def test_going_on_needs_a_run_and_the_same_data_order(whole: Path) -> None:
    with pytest.raises(ConfigError, match="no run to go on with"):
        train(design(whole, steps=STEPS), run_dir=whole / "nowhere", resume=True, say=quiet)
    other = design(whole, Layout(batch=2 * BATCH), steps=STEPS, seed=9)
    with pytest.raises(ConfigError) as caught:
        train(other, run_dir=whole / "run", resume=True, say=quiet)
    assert {problem.where for problem in caught.value.problems} == {"job.batch_tokens", "job.seed"}


def test_a_changed_text_is_refused_on_resume(whole: Path) -> None:
    known = whole / "run" / "corpus.json"
    before = known.read_text()
    known.write_text(json.dumps(json.loads(before) | {"digest": "another"}))
    try:
        with pytest.raises(ConfigError, match="the corpus has changed"):
            train(design(whole, steps=STEPS + 4), run_dir=whole / "run", resume=True, say=quiet)
    finally:
        known.write_text(before)


def test_audit_tells_damaged_records_those_that_are_gone_and_another_seed(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    assert audit(run, cache=tmp_path / "cache").missing == ()
    (run / "corpus.json").write_text("{}")
    with pytest.raises(ConfigError, match="the record of the text is damaged") as damaged:
        audit(run, cache=tmp_path / "cache")
    assert damaged.value.problems[0].where == str(run / "corpus.json")
    for name in ("corpus.json", "tokenizer.json"):
        (run / name).unlink()
    made = design(whole, steps=STEPS)
    write_json(run / "design.json", replace(made, job=replace(made.job, seed=made.job.seed + 1)))
    found = audit(run, cache=tmp_path / "cache")
    assert found.missing == ("corpus.json", "tokenizer.json")
    (problem,) = found.problems
    assert problem.fix == f"set job.seed in design.json back to {made.job.seed}"


def test_what_is_wrong_is_told_before_anything_starts(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        train(design(whole, steps=4, trackers=("tensorbord",)), run_dir=run, say=quiet)
    with pytest.raises(ConfigError, match=r"techniques\[0\]: technique 'low_rnk' is unknown"):
        train(design(whole, steps=4, techniques=("low_rnk",)), run_dir=run, say=quiet)
    missing = DataSpec(sources=(Source(path=str(tmp_path / "nothing.jsonl")),))
    with pytest.raises(ConfigError, match=r"nothing\.jsonl"):
        train(design(whole, steps=4, data=missing), run_dir=run, say=quiet)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(bytes(range(256)) * 64)
    with pytest.raises(ConfigError, match="binary"):
        train(design(whole, steps=4, data=DataSpec(sources=(Source(path=str(binary)),))), run_dir=run, say=quiet)
    with pytest.raises(ConfigError, match="ask for at least one"):
        train(design(whole, steps=4), run_dir=run, steps=0, say=quiet)
    made = design(whole, steps=4)
    small = replace(made, model=replace(made.model, embedding=replace(made.model.embedding, vocab=64)))
    small = replace(small, model=replace(small.model, head=replace(small.model.head, vocab=64)))
    with pytest.raises(ConfigError, match=r"the tokenizer has .* tokens and the model reads 64"):
        train(small, run_dir=run, say=quiet)
    assert not run.exists()


def test_devices_that_are_not_here_are_told_with_the_way_to_start(whole: Path, tmp_path: Path) -> None:
    made = design(whole, steps=4)
    group = made.cluster.groups[0]
    device = replace(group.device, kind=type(group.device.kind)("cuda"))
    elsewhere = replace(made, cluster=replace(made.cluster, groups=(replace(group, device=device),)))
    with pytest.raises(EnvironmentUnfit, match="meshwright launch PLAN --on"):
        train(elsewhere, run_dir=tmp_path / "run", say=quiet)
