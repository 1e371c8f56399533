"""A rank that dies or stops where the others wait: they end in time, and say who, in what, and where in the step."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from meshwright.run import failure, lookout, workers
from meshwright.run.lookout import Lookout
from meshwright.run.train import train
from meshwright.run.workers import Asked
from meshwright.spec.errors import ExitCode, WorkerFailed
from meshwright.spec.incident import Trouble
from meshwright.spec.plan import Sharding
from meshwright.train.observe.collective_log import read_logs
from meshwright.train.observe.incidents import incidents_of
from meshwright.train.observe.inquest import held_in
from meshwright.train.observe.timekeeper import marks_of
from meshwright.train.observe.whereabouts import Section, last_seen
from tests.run.runs import BATCH, after_steps, ask_to_stop, design, worker_of
from tests.support.designs import Layout

PATIENCE = 10.0
NAMED_SECONDS = 1.0
SHARDED = Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS)
PIPELINED = Layout(batch=BATCH, pipeline=2)


def outcome(folder: Path, layout: Layout, act: Callable[[], None], *, patience: float = PATIENCE) -> str:
    """What is told of a run to which `act` is done after three steps."""
    run, said = folder / "run", list[str]()
    entry = design(folder, layout, steps=5000, peer_timeout_seconds=patience)
    thread = after_steps(run, 3, act)
    with pytest.raises(WorkerFailed) as caught:
        train(entry, run_dir=run, say=said.append)
    thread.join()
    (lost,) = incidents_of(run)
    assert lost.trouble is Trouble.LOST
    assert f"{lost.what}; what is left of the run ends" in said
    assert str(caught.value).startswith(lost.what)
    return str(caught.value)


def named_after(folder: Path, done: float) -> float:
    """Seconds until the rank was named, from when it was `done`, or from when the others began to wait where that was
    later: on a busy machine they may have been far from it."""
    (lost,) = incidents_of(folder / "run")
    held = [entry.entered for log in read_logs(folder / "run").values() if (entry := held_in(log)) is not None]
    return lost.at - max([done, *held])


def asked_second(of: int, process: int, options: int) -> os.waitid_result | None:
    """The system's answer to who asks after a child that was killed and has been waited for."""
    found = os.waitid(of, process, options)
    if found is not None and found.si_code != os.CLD_EXITED:
        raise ChildProcessError
    return found


@pytest.mark.parametrize("layout", [SHARDED, pytest.param(PIPELINED, marks=pytest.mark.slow)], ids=str)
def test_a_rank_that_stops_is_named_by_those_that_waited_for_it(layout: Layout, tmp_path: Path) -> None:
    done = list[float]()

    def stop() -> None:
        done.append(time.time())
        worker_of(1).send_signal(signal.SIGSTOP)

    told = outcome(tmp_path, layout, stop)
    ended = marks_of(tmp_path / "run")[-1]
    assert named_after(tmp_path, done[0]) < PATIENCE + NAMED_SECONDS
    assert ended.at - done[0] < 2 * PATIENCE, "nobody waits for half a minute for one that is stopped"
    assert "rank 1 did not come to where the others waited: hung or stopped" in told
    assert "rank 0 waited in " in told
    assert "of ranks 0 and 1 (step " in told
    assert "rank 1 was last seen in step " in told


@pytest.mark.parametrize("agent_asks_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rank_that_dies_is_named_with_what_the_others_were_in(
    agent_asks_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks the system second how it ended is not told."""
    done = list[float]()
    if agent_asks_first:
        monkeypatch.setattr(workers, "os", SimpleNamespace(**{**vars(os), "waitid": asked_second}))

    def kill() -> None:
        done.append(time.time())
        worker_of(1).send_signal(signal.SIGKILL)

    told = outcome(tmp_path, SHARDED, kill)
    assert named_after(tmp_path, done[0]) < NAMED_SECONDS
    assert "rank 1 was killed (signal 9)" in told
    assert "rank 0 waited in " in told
    assert "of ranks 0 and 1 (step " in told


def test_a_rank_alone_that_stands_still_is_named(tmp_path: Path) -> None:
    """Nobody waits for it: its launcher sees that it neither moves nor computes."""
    done, patience = list[float](), 4.0

    def stop() -> None:
        done.append(time.time())
        worker_of(0).send_signal(signal.SIGSTOP)

    told = outcome(tmp_path, Layout(batch=BATCH), stop, patience=patience)
    (lost,) = incidents_of(tmp_path / "run")
    assert patience - 1.0 < lost.at - done[0] < patience + 3 * NAMED_SECONDS
    assert told.startswith("rank 0 stood still in step ")
    assert "neither moved nor computed" in told
    assert lost.ranks == (0,)


@pytest.mark.slow
def test_a_rank_that_dies_as_the_run_is_built_ends_it_at_once(tmp_path: Path) -> None:
    """Who waits for it in a call of torch's would hear no signal."""
    run, done = tmp_path / "run", list[float]()
    entry = design(tmp_path, SHARDED, steps=5000, peer_timeout_seconds=60.0)

    def kill() -> None:
        end = time.monotonic() + 120.0
        while time.monotonic() < end:
            seen = last_seen(run, 1)
            if seen is not None and seen.section is Section.BUILD:
                done.append(time.time())
                worker_of(1).send_signal(signal.SIGKILL)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(WorkerFailed, match=r"rank 1 was killed \(signal 9\)"):
        train(entry, run_dir=run, say=lambda _line: None)
    thread.join()
    (lost,) = incidents_of(run)
    assert lost.at - done[0] < NAMED_SECONDS
    assert marks_of(run)[-1].at - done[0] < 10.0


def test_a_run_that_is_asked_to_stop_as_its_workers_start_ends_as_one_that_is_saved(tmp_path: Path) -> None:
    """They die of the signal before they have learnt to heed it: no rank has hung."""
    entry = design(tmp_path, SHARDED, steps=5000, peer_timeout_seconds=60.0)

    def stop() -> None:
        end = time.monotonic() + 120.0
        while time.monotonic() < end:
            with suppress(AssertionError, psutil.Error):
                worker_of(1)
                ask_to_stop()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    with pytest.raises(WorkerFailed, match="asked to stop before it had begun to train") as caught:
        train(entry, run_dir=tmp_path / "run", say=lambda _line: None)
    thread.join()
    assert caught.value.exit_code is ExitCode.SAVED
    assert not incidents_of(tmp_path / "run")


class Acted:
    """A worker as the launcher sees it, which failed as `failure` says or runs and does nothing."""

    def __init__(self, local: int, *, failure: SimpleNamespace | None, untold: bool = False) -> None:
        self.local, self.failure, self.is_untold, self.process = local, failure, untold, self
        self.ended = 1.0 if failure is not None or untold else None
        self.is_stopped = False

    def idle_seconds(self, *, since: float) -> float:
        return time.time() - since

    def send_signal(self, number: int) -> None:
        self.ended, self.failure = time.time(), SimpleNamespace(exitcode=-number, error_file_data={}, timestamp=2)


def test_a_rank_that_its_launcher_ended_is_not_told_as_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 was killed, which the agent alone knows at first; rank 0 lost it, and rank 2 hears no signal."""
    code = failure.record(RuntimeError("Connection closed by peer"), path=tmp_path / "0", run_dir=tmp_path)
    lost = SimpleNamespace(exitcode=code, error_file_data=json.loads((tmp_path / "0").read_text()), timestamp=2)
    crew, said = [Acted(0, failure=lost), Acted(1, failure=None, untold=True), Acted(2, failure=None)], list[str]()
    monkeypatch.setattr(lookout, "Workers", lambda *_args, **_options: SimpleNamespace(look=lambda: crew))
    watched = Lookout(
        run_dir=tmp_path,
        ranks=(0, 1, 2),
        alone=False,
        module="worker",
        patience_seconds=60.0,
        say=said.append,
        asked=Asked(),
    )
    for _ in range(3):
        watched.look()
    assert watched.ended == {2}
    assert not said
    killed = SimpleNamespace(exitcode=-signal.SIGKILL, error_file_data={}, timestamp=1)
    watched.conclude({0: lost, 1: killed, 2: crew[2].failure})
    assert said == ["rank 1 was killed (signal 9); what is left of the run ends"]
