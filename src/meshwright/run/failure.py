"""Failures of workers in words: written by the worker that failed, read and ranked by the process that launched it."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.run.vigil import Stood, stood_still
from meshwright.run.waiting import Waiting, never_came, told_waits
from meshwright.spec import codec
from meshwright.spec.errors import EnvironmentUnfit, ExitCode, MeshwrightError, Problem, WorkerFailed
from meshwright.spec.units import format_bytes
from meshwright.train.disk import is_full, no_room
from meshwright.train.observe.whereabouts import Whereabouts

_NOBODY: Mapping[int, Whereabouts] = MappingProxyType({})

_LOST_PEER = (
    "connection closed by peer",
    "timed out waiting",
    "wait timeout",
    "connectfullmesh failed",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "socket timeout",
    "client socket has timed out",
    "failed to recv, got 0 bytes",
    "application timeout caused pair closure",
    "collective operation timeout",
)
_OF_ANY_SOCKET = ("connection reset by peer", "connect() error", "broken pipe", "connection refused")
_TRANSPORTS = ("gloo", "nccl")  # which torch's errors of them name
NEAR_FULL = 0.6  # of the machine's memory: from there on a kill without a word is probably the system's for want of it
_UNTOLD = "it could not write why: is the disk of the run full?"
_ROOM_BYTES = 2**16
_SAVE_OF = re.compile(r"rank (\d+): (?:.* on rank (\d+)$)?")  # whose it is stands last, where another one tells it
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


class Nearness(IntEnum):
    """How near a failure is to the cause of all: the lowest is told."""

    OWN = 0
    KILLED = 1
    UNTOLD = 2
    LOST_PEER = 3
    TERMINATED = 4


class LostPeers(RuntimeError):
    """This rank lost others, in `waiting`, and too few are left to go on."""

    def __init__(self, told: str, waiting: Waiting | None) -> None:
        super().__init__(told)
        self.waiting = waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One worker's end. `problems` in words, `trace` only for what nobody foresaw; `local` where it is of what this
    rank has alone, as its memory or its disk, as far as it knows."""

    rank: int
    nearness: Nearness
    exit_code: int
    problems: tuple[Problem, ...]
    trace: str = ""
    seconds: float = 0.0
    signal_number: int = 0
    waiting: Waiting | None = None
    local: bool = False


def keep_room(path: Path | None) -> None:
    """A full disk still has room for what `record` writes to `path`."""
    if path is not None:
        with suppress(OSError):
            _room(path).write_bytes(bytes(_ROOM_BYTES))


def give_room(path: Path | None) -> None:
    """What `keep_room` kept is free."""
    if path is not None:
        with suppress(OSError):
            _room(path).unlink(missing_ok=True)


def _room(path: Path) -> Path:
    return path.with_name(f"{path.name}.room")


def record(error: BaseException, *, path: Path | None, run_dir: Path, waiting: Waiting | None = None) -> int:
    """The exit code for `error`, which is now in the file that the elastic agent reads back, if it can be.

    `waiting` is what this rank was in when it lost another one. The form is torchelastic's, with our own reading of the
    error beside it; a plain torchrun shows its `py_callstack`: a traceback only where nobody foresaw the error.
    """
    known = translate(error, run_dir=run_dir)
    give_room(path)
    lost = is_lost_peer(error)
    code = int(known.exit_code) if known else int(ExitCode.WORKER)
    trace = "".join(traceback.format_exception(error))
    told = f"waited in {waiting.collective or 'a collective'} ({waiting.where})\n" if waiting else ""
    problems = known.problems if known else (Problem(what=f"{type(error).__name__}: {error}"),)
    if path is not None:
        extra = {
            "py_callstack": "\n".join(map(str, known.problems)) if known else f"{told}{trace}",
            "timestamp": str(int(time.time())),
            "seconds": time.time(),
            "kind": "lost peer" if lost else "known" if known else "bug",
            "exit_code": code,
            "problems": codec.encode(problems),
            "waiting": codec.encode(waiting),
            "local": is_local(error),
        }
        document = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        try:
            path.write_text(json.dumps(document))
        except OSError:
            path.unlink(missing_ok=True)  # the agent cannot read half of it
    return code


def translate(error: BaseException, *, run_dir: Path) -> MeshwrightError | None:
    """The error as one that is told in words; None when nobody foresaw it."""
    if isinstance(error, MeshwrightError):
        return error
    if isinstance(error, OSError) and is_full(error):
        return no_room(error, folder=run_dir)
    if _is_out_of_memory(error):
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else "the system gave no memory"
        fix = "take a smaller microbatch, recompute activations or shard more"
        return WorkerFailed(Problem(what="out of memory", why=reason, fix=fix))
    if isinstance(error, OSError) and error.filename:
        why = error.strerror or type(error).__name__
        return WorkerFailed(Problem(what="a file could not be read or written", where=str(error.filename), why=why))
    return None


def is_local(error: BaseException) -> bool:
    """Whether the error is of the memory or the disk of this rank's host, which others need not meet."""
    if isinstance(error, EnvironmentUnfit):
        return rank_of_save(error) is not None
    lost = isinstance(error, ConnectionError)
    return (isinstance(error, OSError | MemoryError) and not lost) or _is_out_of_memory(error)


def rank_of_save(error: BaseException) -> int | None:
    """The rank whose disk did not take its part of a checkpoint, which all ranks are told; None for other errors."""
    found = _SAVE_OF.match(error.problems[0].why) if isinstance(error, EnvironmentUnfit) else None
    return int(found[2] or found[1]) if found is not None else None


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone, be it that a checkpoint was not saved for that."""
    if isinstance(error, LostPeers):
        return True
    if isinstance(error, EnvironmentUnfit):
        return any(_has(problem.why, *_LOST_PEER, *_OF_ANY_SOCKET) for problem in error.problems)
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    known = isinstance(error, DistError) or _has(str(error), *_TRANSPORTS)
    return _has(str(error), *_LOST_PEER, *(_OF_ANY_SOCKET if known else ()))


def _has(text: str, *words: str) -> bool:
    return any(each in text.lower() for each in words)


def read(failures: Mapping[int, Any], *, ended: Collection[int] = ()) -> tuple[Failure, ...]:
    """What torchelastic's failures say, the nearest to the cause first; ranks `ended` were killed after the others."""
    found = [_read_one(rank, failure) for rank, failure in failures.items()]
    found = [_as_ended(each) if each.rank in ended else each for each in found]
    return tuple(sorted(found, key=lambda failure: (failure.nearness, failure.seconds, failure.rank)))


def told(
    failures: Sequence[Failure],
    *,
    predicted_bytes: float,
    machine_bytes: float,
    num_ranks: int,
    last_seen: Mapping[int, Whereabouts] = _NOBODY,
    found: Sequence[str] = (),
    missing: Sequence[int] = (),
    stood: Sequence[Stood] = (),
) -> WorkerFailed:
    """The error that says what the first failure was; it has that worker's exit code.

    `predicted_bytes` is what the worker was predicted to need, `machine_bytes` what all of them share. `last_seen` is
    where ranks were, `found` what their logs say of who kept whom waiting. Ranks that waited longer than they may were
    not left by one that died, unless it died before: those that are `missing`, or were ended after them, had never
    come. Ranks that `stood` still are told before all others.
    """
    first = failures[0]
    problems = first.problems
    waited = [(failure.rank, failure.waiting) for failure in failures if failure.waiting is not None]
    in_vain = any(entry.timed_out for _, entry in waited) and not _died_before_time_outs(failures)
    if stood:
        problems = (stood_still(stood),)
    elif first.nearness in (Nearness.KILLED, Nearness.LOST_PEER) and in_vain:
        ended = missing or [
            failure.rank for failure in failures if failure.nearness in (Nearness.KILLED, Nearness.TERMINATED)
        ]
        problems = (never_came(ended, waited=waited, last_seen=last_seen),)
    elif first.nearness is Nearness.KILLED:
        problem = _killed(first, predicted_bytes, machine_bytes, num_ranks)
        problems = (replace(problem, why="; ".join(part for part in (problem.why, told_waits(waited)) if part)),)
    elif first.nearness is Nearness.LOST_PEER:
        why = told_waits(waited) or first.problems[0].what
        problems = (Problem(what=f"rank {first.rank} lost contact with another rank", why=why),)
    elif first.trace:
        problems = (Problem(what=f"rank {first.rank} failed: {first.problems[0].what}\n\n{first.trace.rstrip()}"),)
    killed = first.nearness is Nearness.KILLED and first.signal_number == signal.SIGKILL and not (in_vain or stood)
    if found and not killed and (first.trace or first.nearness is not Nearness.OWN):
        problems = (replace(problems[0], why="; ".join(part for part in (problems[0].why, *found) if part)),)
    error = WorkerFailed(problems)
    error.exit_code = ExitCode(first.exit_code)
    return error


def are_asked(failures: Sequence[Failure]) -> bool:
    """Whether workers ended because they were asked to, which they had not learnt to heed yet."""
    alike = all(failure.nearness in (Nearness.TERMINATED, Nearness.LOST_PEER) for failure in failures)
    return alike and any(failure.signal_number == signal.SIGTERM for failure in failures)


def ended_how(failure: Failure) -> str:
    """What is told of a rank that ended without a word of its own."""
    if failure.nearness is Nearness.KILLED:
        return f"rank {failure.rank} was killed (signal {failure.signal_number})"
    return failure.problems[0].what


def _as_ended(failure: Failure) -> Failure:
    return replace(failure, nearness=Nearness.TERMINATED) if failure.nearness is Nearness.KILLED else failure


def _died_before_time_outs(failures: Sequence[Failure]) -> bool:
    """Whether the first to fail was killed before others gave up waiting; the agent knows its end to a whole second."""
    gave_up = [failure.seconds for failure in failures if failure.waiting is not None and failure.waiting.timed_out]
    return failures[0].nearness is Nearness.KILLED and bool(gave_up) and failures[0].seconds < int(min(gave_up))


def _killed(failure: Failure, predicted_bytes: float, machine_bytes: float, num_ranks: int) -> Problem:
    what = ended_how(failure)
    if failure.signal_number != signal.SIGKILL:
        return Problem(what=what, why=failure.problems[0].what)
    total = predicted_bytes * num_ranks
    ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    needs = (
        f"predicted {format_bytes(predicted_bytes)} a rank, {format_bytes(total)} for {ranks}; "
        f"the machine has {format_bytes(machine_bytes)}"
    )
    if total >= NEAR_FULL * machine_bytes:
        return Problem(
            what=f"{what}, probably out of memory: {needs}",
            fix="take a plan that needs less memory (meshwright plan shows it by part); --resume goes on",
        )
    return Problem(
        what=f"{what}: the system or a person ended it",
        why=f"memory is not the likely cause unless other programs filled it: {needs}",
        fix="see the log of the system (dmesg) for who ended it; --resume goes on",
    )


def _read_one(rank: int, failure: Any) -> Failure:
    message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    if "kind" in extra:
        bug = extra["kind"] == "bug"
        return Failure(
            rank=rank,
            nearness=Nearness.LOST_PEER if extra["kind"] == "lost peer" else Nearness.OWN,
            exit_code=int(extra["exit_code"]),
            problems=codec.decode(tuple[Problem, ...], extra["problems"], "error file"),
            trace=extra["py_callstack"] if bug else "",
            seconds=float(extra["seconds"]),
            waiting=codec.decode(Waiting, extra["waiting"], "error file") if extra.get("waiting") else None,
            local=bool(extra.get("local", False)),
        )
    number, codes = -failure.exitcode, set(ExitCode)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"exit code {failure.exitcode}"
    untold = Nearness.UNTOLD if failure.exitcode == ExitCode.WORKER else Nearness.OWN
    nearness = Nearness.TERMINATED if number == signal.SIGTERM else Nearness.KILLED if number > 0 else untold
    return Failure(
        rank=rank,
        nearness=nearness,
        exit_code=failure.exitcode if failure.exitcode in codes else int(ExitCode.WORKER),
        problems=(Problem(what=f"rank {rank} ended with {name}", why="" if number > 0 else _UNTOLD),),
        seconds=float(failure.timestamp),
        signal_number=max(number, 0),
        local=failure.exitcode == ExitCode.ENVIRONMENT,
    )
