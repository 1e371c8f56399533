"""A run whose directory is taken away goes on, and can be resumed; one that fails by it says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from meshwright.cost import predict
from meshwright.run.launch import Launched
from meshwright.run.train import failure_of, train
from meshwright.spec.errors import ExitCode
from meshwright.spec.job import CheckpointSpec
from meshwright.train.checkpoint.find import newest
from meshwright.train.events import Log, Saved, Started
from meshwright.train.moved_away import MovedAway, Stays
from meshwright.train.observe.collective_log import CollectiveLog, Group, read_logs
from meshwright.train.observe.whereabouts import Marker, Section, Whereabouts, last_seen
from tests.run.runs import after_steps, ask_to_stop, design, losses


def test_the_design_is_there_again_with_the_next_checkpoint(tmp_path: Path) -> None:
    made, run = design(tmp_path, steps=4), tmp_path / "run"
    keeps = MovedAway(run, design=made)
    assert list(keeps.react(Started(step=0, total_steps=4))) == []
    (said,) = keeps.react(Saved(step=2, seconds=0.0))
    assert isinstance(said, Log)
    assert "was gone and is made again: --resume goes on" in said.text
    assert (run / "design.json").read_text() == made.to_json()
    assert list(keeps.react(Saved(step=4, seconds=0.0))) == []


def test_what_is_told_of_the_run_is_there_again_with_all_that_was_added(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "corpus.json").write_text('{"digest": "a"}')
    (run / "goodput.jsonl").write_text("one\n")
    keeps = MovedAway(run, design=design(tmp_path, steps=4))
    with (run / "goodput.jsonl").open("a") as file:
        file.write("two\n")
    (run / "incidents.jsonl").write_text("slow\n")
    (run / "design.json").write_text("{}")
    assert list(keeps.react(Saved(step=1, seconds=0.0))) == []
    shutil.rmtree(run)
    run.mkdir()
    (run / "goodput.jsonl").write_text("three\n")
    for step in (2, 4):
        list(keeps.react(Saved(step=step, seconds=0.0)))
        assert (run / "corpus.json").read_text() == '{"digest": "a"}'
        assert (run / "goodput.jsonl").read_text() == "one\ntwo\nthree\n"
        assert (run / "incidents.jsonl").read_text() == "slow\n"
        shutil.rmtree(run)


def test_ranks_are_found_again_where_they_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    marker, log = Marker(run, rank=1), CollectiveLog(run, rank=1)
    group = log.know(Group(name="all", ranks=(0, 1)))
    log.leave(log.enter(group, "all_reduce", 8), inside_seconds=0.0)
    marker.mark(step=3, section=Section.SAVE)
    shutil.rmtree(run)
    assert list(Stays(marker=marker, log=log).react(Saved(step=3, seconds=0.0))) == []
    log.enter(group, "broadcast", 8)
    marker.mark(step=4, section=Section.INPUT)
    assert last_seen(run, 1) == Whereabouts(step=4, section=Section.INPUT, process=os.getpid())
    assert [entry.operation for entry in read_logs(run)[1].entries] == ["all_reduce", "broadcast"]


def test_a_failure_is_told_by_the_directory_that_is_gone(tmp_path: Path) -> None:
    made = design(tmp_path, steps=4)
    told = failure_of(made, tmp_path / "run", predicted=predict(made), launched=Launched())
    assert told.exit_code is ExitCode.ENVIRONMENT
    assert f"{tmp_path / 'run'}: the directory of the run is gone" in str(told)


@pytest.mark.slow
def test_a_run_that_lost_its_directory_is_resumed_from_what_it_saved_later(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    made = design(tmp_path, steps=4000, checkpoint=CheckpointSpec(every_steps=5, asynchronous=False))

    def take_away() -> None:
        run.rename(away)
        after_steps(run, 20, ask_to_stop).join()

    taken = after_steps(run, 6, take_away)
    stopped = train(made, run_dir=run, say=lambda _: None)
    taken.join()
    found = newest(run / "checkpoints").checkpoint
    assert found is not None
    assert found.step == stopped.ended.step >= 20
    assert list(losses(run)) == list(range(1, found.step + 1))
    again = train(made, run_dir=run, resume=True, steps=2, say=lambda _: None)
    assert again.ended.step == found.step + 2
