"""A kind of input and what is asked of its reader: it takes the input or says in words what is wrong with it."""

from __future__ import annotations

import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType

from meshwright.spec.errors import MeshwrightError

ROOM_BYTES = 2 << 30  # more than any reader needs for inputs of some kilobytes
WORK_SECONDS = 20.0  # of this process's own work, whatever else the machine does


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`attempt(rng, folder)` makes one broken input of the kind, in `folder` where it is files, and reads it.

    In a full run it has `share` of all inputs; `quick` of them are tried in every run of the tests. A reader of what a
    dead run left leaves out what it cannot read and `refuses` nothing; one that `takes` nothing is given halves.
    """

    name: str
    attempt: Callable[[Random, Path], object]
    share: float = 1.0
    quick: int = 40
    refuses: bool = True
    takes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that a reader neither took nor refused in words; `python -m tests.fuzz --only KIND --seed SEED` does it
    again."""

    kind: str
    seed: int
    told: str

    def __str__(self) -> str:
        return f"{self.kind} {self.seed}: {self.told}"


class Endless(BaseException):
    """A reader has worked longer than any input of this size can need."""


def attempt(kind: Kind, seed: int, *, folder: Path) -> Finding | bool:
    """Whether the input was taken; a finding where its reader broke."""
    try:
        with _bounded_work():
            kind.attempt(Random(f"{kind.name} {seed}"), folder)
    except MeshwrightError as error:
        whole = bool(error.problems) and all(problem.what for problem in error.problems)
        return False if whole else Finding(kind=kind.name, seed=seed, told="an error without words")
    except Endless:
        return Finding(kind=kind.name, seed=seed, told=f"no end after {WORK_SECONDS:g} s of work")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # libraries in Rust panic with one of their own
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        ours = next((frame for frame in reversed(frames) if "/meshwright/" in frame.filename), last)
        where = f"{ours.filename.partition('/src/')[2] or ours.filename}:{ours.lineno} {ours.name}"
        return Finding(kind=kind.name, seed=seed, told=f"{type(error).__name__}: {str(error)[:200]} at {where}")
    return True


@contextmanager
def _bounded_work() -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise Endless

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, WORK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What asks for more than ROOM_BYTES beyond what this process has now is refused with MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
