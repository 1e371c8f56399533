"""Real runs that lose ranks and go on: the same losses, no worker started again but the lost, every sequence once."""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistError, DistNetworkError, TCPStore

from meshwright.run.audit import audit
from meshwright.run.elastic.board import Board
from meshwright.run.elastic.homes import Home
from meshwright.run.files import load_design
from meshwright.run.handshake import WORD_VARIABLE
from meshwright.run.train import train
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ExitCode, WorkerFailed
from meshwright.spec.goodput import Spent
from meshwright.spec.job import CheckpointSpec, Constraints
from meshwright.spec.plan import Sharding
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec, SyncKind, usual_rounds
from meshwright.train.observe.collective_log import read_logs
from meshwright.train.observe.incidents import incidents_of
from meshwright.train.observe.whereabouts import Section
from tests.run.elastic_runs import elastic, epochs, kill_in, member, until, until_step
from tests.run.runs import ask_to_stop, design, losses, rows, validation
from tests.support.designs import Layout

BATCH = 12
REPLICAS = Layout(replicate=4, batch=BATCH)
SHARDS = Layout(shard=4, sharding=Sharding.PARAMETERS, batch=BATCH)
STAGES = Layout(pipeline=2, replicate=2, batch=BATCH)


def quiet(line: str) -> None:
    """Nobody watches a test."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name", "rank", "section"),
    [(REPLICAS, "0.0", 0, Section.MODEL), (SHARDS, "2.0", 2, Section.COPY), (STAGES, "3.0", 3, Section.OPTIMIZER)],
    ids=str,
)
def test_a_run_goes_on_without_a_rank_and_takes_in_another(
    layout: Layout, name: str, rank: int, section: Section, tmp_path: Path
) -> None:
    run, pids = tmp_path / "run", list[dict[str, int]]()
    others = sorted({"0.0", "1.0", "2.0", "3.0"} - {name})

    def act() -> None:
        until_step(run, 5)
        pids.append({other: member(other).pid for other in others})
        kill_in(run, name, rank=rank, section=section)
        until(lambda: len(epochs(run)) == 3)
        until_step(run, max(losses(run)) + 5)
        pids.append({other: member(other).pid for other in others})
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    outcome = train(elastic(tmp_path, layout, steps=5000), run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert [epoch["ranks"] for epoch in epochs(run)] == [4, 3, 4]
    first, lost, back = epochs(run)
    assert lost["why"] == f"rank {rank} was killed (signal 9)"
    assert lost["source"] is not None
    assert lost["undone_steps"] <= 1
    assert back["undone_steps"] == 0
    assert back["plan"] == first["plan"]
    assert pids[0] == pids[1], "no survivor was started again"
    steps = outcome.ended.step
    assert sorted(losses(run)) == list(range(1, steps + 1))
    alone = design(tmp_path, Layout(batch=BATCH), steps=steps)
    train(alone, run_dir=tmp_path / "alone", say=quiet)
    expected = losses(tmp_path / "alone")
    assert all(abs(loss - expected[step]) <= 1e-9 * abs(expected[step]) for step, loss in losses(run).items())
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())
    assert outcome.goodput is not None
    assert outcome.goodput.failures == 1
    assert outcome.goodput.seconds[Spent.REPLAN] > 0.0
    assert lost["why"] in [one.why for one in outcome.goodput.interruptions]
    regrouped = [row for row in rows(run) if "regroup_seconds" in row]
    assert [row["ranks"] for row in regrouped] == [3.0, 4.0]
    logs = read_logs(run)
    assert sorted(logs) == [0, 1, 2, 3], "the ranks of the last epoch are watched"
    assert all(log.entries[-1].step > lost["source"]["step"] for log in logs.values())


@pytest.mark.slow
def test_a_batch_that_the_ranks_left_do_not_divide_is_read_whole(tmp_path: Path) -> None:
    """Three ranks with three rows each, of which one is empty, read the eight sequences that four read."""
    run, spec = tmp_path / "run", Constraints(forbid=("pipeline", "tensor", "context"))

    def act() -> None:
        until_step(run, 5)
        member("1.0").kill()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    layout = Layout(shard=4, sharding=Sharding.PARAMETERS, batch=8)
    made = elastic(tmp_path, layout, steps=30, constraints=spec)
    made = replace(made, job=replace(made.job, elastic=replace(made.job.elastic, replacements=0)))
    outcome = train(made, run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.OK
    assert [epoch["ranks"] for epoch in epochs(run)] == [4, 3]
    (path,) = (run / "elastic").glob("ranks-3/design.json")
    assert load_design(path).plan.empty_rows == 1
    assert sorted(losses(run)) == list(range(1, 31))
    train(design(tmp_path, Layout(batch=8), steps=30), run_dir=tmp_path / "alone", say=quiet)
    for told in (losses, validation):
        expected = told(tmp_path / "alone")
        assert told(run).keys() == expected.keys()
        assert all(abs(loss - expected[step]) <= 1e-9 * abs(expected[step]) for step, loss in told(run).items())
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (30 * 8, ())


@pytest.mark.slow
def test_a_replacement_that_dies_as_it_is_taken_in_is_lost_alone(tmp_path: Path) -> None:
    run, pids = tmp_path / "run", list[dict[str, int]]()
    others = ("0.0", "1.0", "3.0")

    def act() -> None:
        until_step(run, 5)
        pids.append({other: member(other).pid for other in others})
        member("2.0").kill()
        until(lambda: len(epochs(run)) == 3)
        member("2.1").kill()
        until(lambda: len(epochs(run)) == 4)
        until_step(run, max(losses(run)) + 5)
        pids.append({other: member(other).pid for other in others})
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    outcome = train(elastic(tmp_path, SHARDS, steps=5000), run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert [epoch["members"][-1] for epoch in epochs(run)] == ["3.0", "3.0", "2.1", "3.0"]
    assert epochs(run)[3]["source"] is not None, "what those who were there copied as they left is enough"
    assert epochs(run)[3]["undone_steps"] <= 1
    assert pids[0] == pids[1], "no survivor was started again"
    steps = outcome.ended.step
    assert sorted(losses(run)) == list(range(1, steps + 1))
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind", "fewest"),
    [
        (Layout(replicate=3, batch=BATCH), SyncKind.STREAMING, 2),
        (Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=BATCH), SyncKind.DILOCO, 2),
    ],
    ids=str,
)
def test_learners_go_on_without_a_lost_one_and_take_another_in(
    layout: Layout, kind: SyncKind, fewest: int, tmp_path: Path
) -> None:
    run, pids = tmp_path / "run", list[dict[str, int]]()
    others = ("0.0", "2.0")
    rounds = usual_rounds(kind, every=6, learners=layout.replicate, precision=Precision.FP64)
    made = elastic(tmp_path, layout, steps=5000, fewest=fewest, synchronize=SynchronizeSpec(kinds=(kind,), every=6))
    made = replace(made, plan=replace(made.plan, gradients=GradientSync(kind=kind, rounds=rounds)))

    def act() -> None:
        until_step(run, 9)
        pids.append({other: member(other).pid for other in others})
        kill_in(run, "1.0", rank=1, section=Section.MODEL)
        until(lambda: len(epochs(run)) == 3)
        until_step(run, max(losses(run)) + 9)
        pids.append({other: member(other).pid for other in others})
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    outcome = train(made, run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    each = layout.ranks // layout.replicate
    assert [epoch["ranks"] for epoch in epochs(run)] == [layout.ranks, layout.ranks - each, layout.ranks]
    _, lost, back = epochs(run)
    assert lost["why"].startswith("rank 1 was killed (signal 9)")
    assert lost["source"] is not None
    assert lost["undone_steps"] <= 2 * rounds.every
    assert back["source"]["step"] % rounds.every == 0, "it is taken in at the end of a round"
    assert back["undone_steps"] == 0
    assert pids[0] == pids[1], "no survivor was started again"
    steps = outcome.ended.step
    assert sorted(losses(run)) == list(range(1, steps + 1))
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * BATCH, ())
    regrouped = [row for row in rows(run) if "regroup_seconds" in row]
    assert [row["learners"] for row in regrouped] == [layout.replicate - 1.0, layout.replicate]
    assert [row["dropped_sequences"] for row in regrouped] == [found.dropped, 0.0]
    assert found.dropped <= 2 * rounds.every * BATCH // layout.replicate
    assert outcome.goodput is not None
    told = [one.why for one in outcome.goodput.interruptions]
    assert any(f"without learner {1 // each}, of which {found.dropped}" in why for why in told), told
    assert any(f"learner {layout.replicate - 1} begins where the others met" in why for why in told), told


@pytest.mark.slow
def test_a_rank_that_stops_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    run, done, patience = tmp_path / "run", list[float](), 4.0

    def act() -> None:
        until_step(run, 3)
        done.append(time.time())
        member("1.0").send_signal(signal.SIGSTOP)
        until(lambda: len(epochs(run)) == 2)
        until_step(run, max(losses(run)) + 3)
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    layout = Layout(shard=2, sharding=Sharding.PARAMETERS, batch=BATCH)
    outcome = train(
        elastic(tmp_path, layout, steps=5000, fewest=1, peer_timeout_seconds=patience), run_dir=run, say=quiet
    )
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert epochs(run)[1]["why"] == "rank 1 did not come to where the others waited: hung or stopped"
    (lost,) = incidents_of(run)
    assert (lost.ranks, lost.what) == ((1,), epochs(run)[1]["why"])
    assert lost.at - done[0] < patience + 3.0  # one of them on an idle machine


@pytest.mark.slow
def test_one_that_stops_as_it_is_taken_in_is_ended_and_so_is_one_whose_others_are_gone(tmp_path: Path) -> None:
    run, done, patience = tmp_path / "run", list[float](), 4.0

    def act() -> None:
        until_step(run, 3)
        member("2.0").kill()
        until(lambda: len(epochs(run)) == 3)
        done.append(time.time())
        member("2.1").send_signal(signal.SIGSTOP)
        until(lambda: len(epochs(run)) == 4)
        until_step(run, max(losses(run)) + 3)
        done.append(time.time())
        member("1.0").send_signal(signal.SIGSTOP)
        member("0.0").kill()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    layout = Layout(shard=3, sharding=Sharding.PARAMETERS, batch=BATCH)
    made = elastic(tmp_path, layout, steps=5000, fewest=1, peer_timeout_seconds=patience)
    made = replace(made, job=replace(made.job, elastic=replace(made.job.elastic, replacements=1)))
    with pytest.raises(WorkerFailed):
        train(made, run_dir=run, say=quiet)
    thread.join()
    _, forming, _, alone = incidents_of(run)
    for lost, rank, since in ((forming, 2, done[0]), (alone, 1, done[1])):
        assert lost.ranks == (rank,)
        # The replacement may be through with forming by the time that it stops: others then wait for it in a step.
        assert lost.what.startswith((f"rank {rank} was stopped for 4", f"rank {rank} did not come to where"))
        assert lost.at - since < patience + 3.0  # less than one of them on an idle machine
    assert epochs(run)[3]["why"] == forming.what


@pytest.mark.slow
def test_a_rank_whose_files_cannot_grow_is_lost_alone(tmp_path: Path) -> None:
    """It meets that where it writes the spans of a sampled step, and cannot even write why it failed."""
    run = tmp_path / "run"

    def act() -> None:
        until_step(run, 8)
        resource.prlimit(member("1.0").pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        until(lambda: len(epochs(run)) == 2)
        until_step(run, max(losses(run)) + 3)
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    made = elastic(tmp_path, Layout(replicate=3, batch=BATCH), steps=5000)
    outcome = train(made, run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert epochs(run)[1]["why"].startswith("rank 1 failed: rank 1 ended with exit code 4")
    assert sorted(losses(run)) == list(range(1, outcome.ended.step + 1))
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (outcome.ended.step * BATCH, ())


@pytest.mark.slow
def test_a_disk_that_takes_no_part_of_a_checkpoint_of_one_rank_loses_that_rank(tmp_path: Path) -> None:
    """All are told by the one whose disk it is, and take that as its loss."""
    run = tmp_path / "run"

    def act() -> None:
        until_step(run, 8)
        resource.prlimit(member("2.0").pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        until(lambda: len(epochs(run)) == 2)
        until_step(run, max(losses(run)) + 12)
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    saves = CheckpointSpec(every_steps=10, keep=3)
    made = elastic(tmp_path, Layout(shard=3, sharding=Sharding.PARAMETERS, batch=BATCH), steps=5000, checkpoint=saves)
    outcome = train(made, run_dir=run, say=quiet)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert "rank 2 failed: " in epochs(run)[1]["why"]
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (outcome.ended.step * BATCH, ())


@pytest.mark.slow
def test_a_run_that_loses_too_many_says_who_was_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def act() -> None:
        until_step(run, 3)
        member("1.0").kill()
        member("2.0").kill()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    with pytest.raises(WorkerFailed, match=r"rank [12] was killed \(signal 9\)"):
        train(elastic(tmp_path, REPLICAS, steps=5000, fewest=3), run_dir=run, say=quiet)
    thread.join()


@pytest.mark.slow
def test_strangers_at_the_board_change_nothing_and_nobody_reads_the_word(tmp_path: Path) -> None:
    run, said, words = tmp_path / "run", list[str](), list[str]()
    begins = "the board refused a connection of 127.0.0.1:"

    def act() -> None:
        until_step(run, 3)
        worker = member("1.0")
        words.append(worker.environ()[WORD_VARIABLE])
        at = Home.of(worker.cmdline()[worker.cmdline().index("--board") + 1])
        for word in ("", "another", words[0][:-1]):
            with pytest.raises(DistNetworkError):
                Board.at([at], word=word)
        with pytest.raises(DistError):
            TCPStore(at.address, at.port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
        with socket.create_connection((at.address, at.port)):
            kill_in(run, "2.0", rank=2, section=Section.MODEL)
            until(lambda: len(epochs(run)) == 3)
        lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        words.extend(line for line in lines if words[0] in line)
        ask_to_stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    outcome = train(elastic(tmp_path, SHARDS, steps=5000), run_dir=run, say=said.append)
    thread.join()
    assert outcome.exit_code is ExitCode.SAVED
    assert sorted(losses(run)) == list(range(1, outcome.ended.step + 1))
    assert len(words) == 1, "no command has it"
    assert len([line for line in said if line.startswith(begins)]) >= 4, said
    kept = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in kept if words[0].encode() in path.read_bytes()]
