"""Which of many failures is told, and in which words."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from meshwright.run import failure
from meshwright.run.failure import Nearness
from meshwright.run.waiting import Waiting
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, MeshwrightError, Problem, WorkerFailed
from meshwright.train.observe.whereabouts import Marker, Section, Whereabouts, last_seen, path_of

LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5")


def recorded(error: BaseException, path: Path) -> SimpleNamespace:
    code = failure.record(error, path=path, run_dir=path.parent)
    return SimpleNamespace(exitcode=code, error_file_data=json.loads(path.read_text()), timestamp=0)


def ended(exit_code: int, *, timestamp: int = 2**62) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exit_code, error_file_data={}, timestamp=timestamp)


def first(failures: dict[int, SimpleNamespace]) -> MeshwrightError:
    return failure.told(failure.read(failures), predicted_bytes=1.0, machine_bytes=2.0, num_ranks=len(failures))


def test_the_rank_that_failed_is_told_before_those_that_lost_it(tmp_path: Path) -> None:
    failures = {
        0: recorded(LOST, tmp_path / "0"),
        1: recorded(WorkerFailed(Problem(what="the loss of step 3 is nan")), tmp_path / "1"),
        2: ended(-signal.SIGTERM),
    }
    assert str(first(failures)) == "the loss of step 3 is nan"
    assert [entry.rank for entry in failure.read(failures)] == [1, 0, 2]


def killed(tmp_path: Path, *, predicted_bytes: float) -> str:
    failures = {0: recorded(LOST, tmp_path / "0"), 1: ended(-signal.SIGKILL)}
    found = failure.read(failures)
    return str(failure.told(found, predicted_bytes=predicted_bytes, machine_bytes=64.0 * 2**30, num_ranks=2))


def test_a_killed_rank_is_told_before_those_that_lost_it(tmp_path: Path) -> None:
    told = killed(tmp_path, predicted_bytes=30.0 * 2**30)
    assert "rank 1 was killed (signal 9), probably out of memory" in told
    assert "predicted 30 GiB a rank, 60 GiB for 2 ranks; the machine has 64 GiB" in told


def test_a_save_that_failed_for_want_of_a_rank_does_not_hide_that_it_was_killed(tmp_path: Path) -> None:
    why = "Read error [127.0.0.1]:3995: Connection reset by peer"
    unsaved = EnvironmentUnfit(Problem(what="the checkpoint of step 6 was not saved", why=why))
    error = first({0: recorded(unsaved, tmp_path / "0"), 1: ended(-signal.SIGKILL)})
    assert "rank 1 was killed (signal 9)" in str(error)


def test_memory_is_not_blamed_where_little_was_predicted(tmp_path: Path) -> None:
    told = killed(tmp_path, predicted_bytes=2.0**30)
    assert "probably out of memory" not in told
    assert "rank 1 was killed (signal 9): the system or a person ended it" in told
    assert "predicted 1 GiB a rank, 2 GiB for 2 ranks; the machine has 64 GiB" in told


def test_another_signal_does_not_blame_memory() -> None:
    error = first({0: ended(-signal.SIGSEGV)})
    assert "rank 0 was killed (signal 11)" in str(error)
    assert "memory" not in str(error)


def test_a_bug_has_that_rank_s_traceback_and_no_other(tmp_path: Path) -> None:
    def broken() -> None:
        raise KeyError("nowhere")

    try:
        broken()
    except KeyError as error:
        failures = {3: recorded(error, tmp_path / "3"), 0: recorded(LOST, tmp_path / "0")}
    told = first(failures)
    assert "rank 3 failed: KeyError: 'nowhere'" in str(told)
    assert "in broken" in str(told)
    assert "Connection closed" not in str(told)
    assert told.exit_code is ExitCode.WORKER


def test_only_lost_peers(tmp_path: Path) -> None:
    assert "rank 2 lost contact with another rank" in str(first({2: recorded(LOST, tmp_path / "2")}))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (failure.LostPeers("the launcher told", None), True),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:302] writev [127.0.0.1]:5: Broken pipe"), True),
        (DistNetworkError("failed to send: Broken pipe"), True),
        (DistStoreError("wait timeout after 1000 ms, keys: here"), True),
        (RuntimeError("broken pipe to the daemon of the GPU"), False),
        (WorkerFailed(Problem(what="Connection refused by the tracker")), False),
        (EnvironmentUnfit(Problem(what="broken pipe: no compiler")), False),
    ],
    ids=lambda value: str(value),
)
def test_what_any_socket_says_is_of_a_rank_where_a_transport_says_it(error: Exception, lost: bool) -> None:
    assert failure.is_lost_peer(error) is lost


def test_a_known_error_keeps_every_problem_and_its_exit_code(tmp_path: Path) -> None:
    error = ConfigError([Problem(what="one", where="a", fix="x"), Problem(what="two")])
    told = first({0: recorded(error, tmp_path / "0")})
    assert told.problems == error.problems
    assert told.exit_code is ExitCode.USAGE


def test_memory_and_files_are_told_in_words(tmp_path: Path) -> None:
    allocation = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you ...")
    assert "out of memory" in str(failure.translate(allocation, run_dir=tmp_path))
    assert "out of memory" in str(failure.translate(MemoryError(), run_dir=tmp_path))
    full = OSError(28, "No space left on device", "/somewhere/file")
    told = failure.translate(full, run_dir=tmp_path)
    assert told is not None
    assert told.exit_code == ExitCode.ENVIRONMENT
    assert "/somewhere/file: nothing more can be written: No space left on device (the file system at /" in str(told)
    assert failure.translate(ValueError("x"), run_dir=tmp_path) is None


def test_where_the_disk_takes_no_word_the_exit_code_still_says_it(tmp_path: Path) -> None:
    """Half a file would be read by the agent, which fails of it."""
    path = tmp_path / "error.json"
    failure.keep_room(path)
    assert (tmp_path / "error.json.room").stat().st_size > 2**15
    path.symlink_to("/dev/full")
    code = failure.record(OSError(28, "No space left on device"), path=path, run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    told = first({0: ended(code)})
    assert told.exit_code is ExitCode.ENVIRONMENT
    assert "rank 0 ended with exit code 4 (it could not write why: is the disk of the run full?)" in str(told)


def waited(folder: Path, rank: int, *, timed_out: bool) -> SimpleNamespace:
    waiting = Waiting(where="step 4, optimizer", collective="all_reduce 12 of ranks 0, 1 and 2", timed_out=timed_out)
    return SimpleNamespace(
        exitcode=failure.record(LOST, path=folder / str(rank), run_dir=folder, waiting=waiting),
        error_file_data=json.loads((folder / str(rank)).read_text()),
        timestamp=0,
    )


def test_a_rank_that_was_ended_after_others_had_waited_too_long_had_hung(tmp_path: Path) -> None:
    failures = {0: waited(tmp_path, 0, timed_out=True), 2: waited(tmp_path, 2, timed_out=False), 1: ended(-9)}
    seen = {1: Whereabouts(step=4, section=Section.INPUT)}
    found = failure.told(failure.read(failures), predicted_bytes=1.0, machine_bytes=2.0, num_ranks=3, last_seen=seen)
    assert str(found).startswith(
        "rank 1 did not come to where the others waited: hung or stopped (ranks 0 and 2 waited "
    )
    assert "in all_reduce 12 of ranks 0, 1 and 2 (step 4, optimizer); rank 1 was last seen in step 4, reading" in str(
        found
    )
    assert found.exit_code is ExitCode.WORKER
    del failures[1]
    assert str(first(failures)).startswith("ranks waited in vain for each other (ranks 0 and 2 waited in all_reduce 12")


def test_a_rank_that_died_before_others_had_waited_too_long_was_killed(tmp_path: Path) -> None:
    failures = {0: waited(tmp_path, 0, timed_out=True), 1: ended(-signal.SIGKILL, timestamp=int(time.time()) - 4)}
    told = str(first(failures))
    assert "rank 1 was killed (signal 9)" in told
    assert "rank 0 waited in all_reduce 12" in told
    assert "hung" not in told


def test_a_killed_rank_is_told_before_one_that_could_not_write_why_it_failed(tmp_path: Path) -> None:
    """The disk may be full where a rank dies: the other has lost it and cannot say so."""
    untold = ended(int(ExitCode.WORKER))
    assert "rank 1 was killed (signal 9)" in str(first({0: untold, 1: ended(-signal.SIGKILL)}))
    assert "rank 0 ended with exit code 5" in str(first({0: untold, 1: recorded(LOST, tmp_path / "1")}))
    full = ended(int(ExitCode.ENVIRONMENT))
    assert "rank 0 ended with exit code 4" in str(first({0: full, 1: ended(-signal.SIGKILL)}))


def test_a_killed_rank_is_told_with_what_the_others_were_in(tmp_path: Path) -> None:
    told = str(first({0: waited(tmp_path, 0, timed_out=False), 1: ended(-signal.SIGKILL)}))
    assert "rank 1 was killed (signal 9)" in told
    assert "rank 0 waited in all_reduce 12 of ranks 0, 1 and 2 (step 4, optimizer)" in told


def test_marks_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    Marker(tmp_path, rank=3).mark(step=17, section=Section.SAVE)
    assert last_seen(tmp_path, 3) == Whereabouts(step=17, section=Section.SAVE, process=os.getpid())
    assert last_seen(tmp_path, 4) is None
    path_of(tmp_path, 3).write_text("{half")
    assert last_seen(tmp_path, 3) is None


def test_errors_of_one_host_alone_are_told_from_those_of_all(tmp_path: Path) -> None:
    unsaved = "the checkpoint of step 6 was not saved"
    local = (
        OSError(28, "No space left on device", "/somewhere/file"),
        PermissionError(13, "Permission denied", "/somewhere"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        EnvironmentUnfit(Problem(what=unsaved, why="rank 1: [Errno 28] No space left on device")),
    )
    of_all = (
        KeyError("nowhere"),
        WorkerFailed(Problem(what="the loss of step 3 is nan")),
        ConfigError(Problem(what="no such file")),
        EnvironmentUnfit(Problem(what="no compiler")),
        ConnectionResetError("reset"),
        LOST,
    )
    other = EnvironmentUnfit(Problem(what=unsaved, why="rank 0: [Errno 28] No space left on device on rank 2"))
    assert [failure.rank_of_save(error) for error in (local[-1], other, *of_all[:4])] == [1, 2, *[None] * 4]
    assert [failure.is_local(error) for error in (*local, *of_all)] == [True] * len(local) + [False] * len(of_all)
    (found,) = failure.read({1: recorded(MemoryError(), tmp_path / "1")})
    assert found.local
    assert failure.read({1: ended(int(ExitCode.ENVIRONMENT))})[0].local, "it could not even write why"


def test_ranks_that_the_launcher_ended_are_not_told_as_killed(tmp_path: Path) -> None:
    failures = {0: ended(-9, timestamp=1), 1: ended(-9, timestamp=2)}
    assert [each.rank for each in failure.read(failures, ended=[0])] == [1, 0]
    asked = failure.read({0: waited(tmp_path, 0, timed_out=True), 1: ended(-signal.SIGTERM)})
    assert failure.are_asked(asked)
    assert not failure.are_asked(failure.read({0: waited(tmp_path, 0, timed_out=True), 1: ended(-9)}, ended=[1]))


def test_nearness_orders_causes() -> None:
    assert sorted(Nearness) == [
        Nearness.OWN,
        Nearness.KILLED,
        Nearness.UNTOLD,
        Nearness.LOST_PEER,
        Nearness.TERMINATED,
    ]
