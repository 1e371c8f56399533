"""Remote: commands that run on hosts at once, their lines gathered, and none of them left behind."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.run.launching.ssh import Named, log_of
from meshwright.run.signals import TO_STOP, heeding
from meshwright.spec.errors import ExitCode, Problem, WorkerFailed

Say = Callable[[str], None]
Show = Callable[[str, str], None]  # (host, line)
_LOOK_SECONDS = 0.1
# From the first host that fails: the others find that it is gone, and then save what they have.
_FOLLOWING_SECONDS = 60.0
_ENDING_SECONDS = 30.0
_AGAIN_SECONDS = 30.0
_WELL = (ExitCode.OK, ExitCode.SAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    host: str
    process: subprocess.Popen[str]
    reader: threading.Thread


def run(named: Sequence[Named], *, run_dir: Path, say: Say, show: Show, outlives: bool) -> int:
    """The exit code of the run, which has ended on every host; nothing that was started there still runs.

    Every line goes to `show` and into RUN/logs. The first signal asks all hosts to save and stop, a second Ctrl-C or
    SIGTERM stops them at once; they stop, saved, also when this process is killed. Where the run `outlives` a host, one
    that is lost is entered again from time to time, and the others go on; otherwise raises WorkerFailed for it.
    """
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    try:
        with _forwarding(running, say):
            running += [_start(each, log_of(run_dir, index, each.host), show) for index, each in enumerate(named)]
            if outlives:
                _wait_for_most(running, named, run_dir=run_dir, say=say, show=show)
            else:
                _wait(running)
    finally:
        for each in running:
            _end(each)
    return _code(running, outlives=outlives)


def _start(each: Named, log: Path, show: Show) -> _Running:
    process = subprocess.Popen(
        each.entered,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_read, args=(each.host, process, log, show), daemon=True)
    reader.start()
    return _Running(host=each.host, process=process, reader=reader)


def _read(host: str, process: subprocess.Popen[str], log: Path, show: Show) -> None:
    assert process.stdout is not None
    with log.open("a") as kept:
        for line in process.stdout:
            kept.write(line)
            kept.flush()
            show(host, line.rstrip("\n"))


def _wait(running: Sequence[_Running]) -> None:
    """All have ended, or one failed and the others did not follow it."""
    deadline = float("inf")
    while None in (codes := _codes(running)):
        if not {None, ExitCode.OK, ExitCode.SAVED}.issuperset(codes):
            deadline = min(deadline, time.monotonic() + _FOLLOWING_SECONDS)
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_SECONDS)


def _codes(running: Sequence[_Running]) -> list[int | None]:
    """What each has ended with by now; None while it runs. All are asked: a code is not known before."""
    return [each.process.poll() for each in running]


def _wait_for_most(running: list[_Running], named: Sequence[Named], *, run_dir: Path, say: Say, show: Show) -> None:
    """All have ended, or one has ended well and the others did not follow it. Hosts that are lost before are entered
    again, so that those who train take them in."""
    again: dict[int, float] = {}
    deadline = float("inf")
    while None in (codes := _codes(running)) and time.monotonic() < deadline:
        if not set(_WELL).isdisjoint(codes):
            deadline = min(deadline, time.monotonic() + _FOLLOWING_SECONDS)
        for index, (each, code) in enumerate(zip(running, codes, strict=True)):
            if code is None or code in set(ExitCode):
                continue
            if index not in again:
                say(f"{each.host} is lost; the others go on, and it is entered again until it comes back")
            if again.setdefault(index, time.monotonic() + _AGAIN_SECONDS) <= time.monotonic():
                again[index] = time.monotonic() + _AGAIN_SECONDS
                running[index] = _start(named[index], log_of(run_dir, index, each.host), show)
        time.sleep(_LOOK_SECONDS)


def _end(each: _Running) -> None:
    """The host is asked to save by the end of its input, and then left to it: it stops by itself."""
    _tell(each, "")
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if each.process.poll() is not None:
            break
        if number is not None:
            each.process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            each.process.wait(_ENDING_SECONDS)
    each.reader.join(_ENDING_SECONDS)


def _tell(each: _Running, word: str) -> None:
    """The word is said to the host, if it still listens; without one its input ends."""
    assert each.process.stdin is not None
    with suppress(OSError, ValueError):
        if word:
            each.process.stdin.write(f"{word}\n")
            each.process.stdin.flush()
        else:
            each.process.stdin.close()


@contextmanager
def _forwarding(running: Sequence[_Running], say: Say) -> Iterator[None]:
    """The first signal of this process says `save` to all hosts, the second `stop`; SIGUSR1 is never the second."""
    insisted = 0

    def handle(number: int) -> None:
        nonlocal insisted
        insisted += number != signal.SIGUSR1
        word = "stop" if insisted > 1 else "save"
        for each in running:
            _tell(each, word)
        with suppress(OSError):
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            say(f"{name}: every host is asked to {word}" + ("; once more stops at once" if word == "save" else ""))

    with heeding(TO_STOP, handle):
        yield


def _code(running: Sequence[_Running], *, outlives: bool) -> int:
    """The first of what went wrong, by the order of the hosts; of what ended well the highest, which is all that says
    how a run ended that outlives hosts."""
    codes = [(each.host, each.process.returncode) for each in running]
    well = [code for _, code in codes if code in _WELL]
    if outlives and well:
        return max(well)
    known = [code for _, code in codes if code in set(ExitCode) and code not in _WELL]
    if known:
        return int(known[0])
    lost = [host for host, code in codes if code not in _WELL]
    if lost:
        why = "the connection broke, or what ran there was killed"
        fix = "see RUN/logs; the same command with --resume goes on from what was saved"
        raise WorkerFailed(Problem(what="ended without a word", where=", ".join(lost), why=why, fix=fix))
    return max(code for _, code in codes)
