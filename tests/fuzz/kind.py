"""A kind of input and what is asked of its reader: it takes the input or says in words what is wrong with it."""

from __future__ import annotations

import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from meshwright.spec.errors import MeshwrightError

ROOM_BYTES = 2 << 30  # more than any reader needs for inputs of some kilobytes
WORK_SECONDS = 20.0  # of this process's own work, whatever else the machine does
FRAMES = 1000  # as many as Python lets a command have

Files = Mapping[str, str | bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`make(rng)` makes one broken input of the kind and `read(made, folder)` reads it, in `folder` where it is files.

    In a full run it has `share` of all inputs; `quick` of them are tried in every run of the tests. A reader of what a
    dead run left leaves out what it cannot read and `refuses` nothing; one that `takes` nothing is given halves.
    """

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any, Path], object]
    share: float = 1.0
    quick: int = 40
    refuses: bool = True
    takes: bool = True


class Broken(Exception):
    """A reader neither took an input nor refused it in words: what it did and where."""

    def __init__(self, what: str, told: str, place: str = "") -> None:
        super().__init__(f"{what}{told}{place and f' at {place}'}")
        self.place = f"{what} {place}"


class Endless(BaseException):
    """A reader has worked longer than any input of this size can need."""


def put(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def of_files(read: Callable[[Path], object]) -> Callable[[Files, Path], object]:
    """The reader of a folder as one of the files that are put there."""

    def put_and_read(files: Files, folder: Path) -> object:
        put(folder, files)
        return read(folder)

    return put_and_read


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[Files, Path], object]:
    return of_files(lambda folder: read(folder / name))


def taken(kind: Kind, made: Any, *, folder: Path) -> bool:
    """Whether the input was taken and not refused. Raises Broken where its reader broke."""
    try:
        with _bounded_work():
            kind.read(made, folder)
    except MeshwrightError as error:
        if error.problems and all(problem.what for problem in error.problems):
            return False
        raise Broken("an error without words", "") from error
    except Endless as error:
        raise Broken("no end", f" after {WORK_SECONDS:g} s of work") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # libraries in Rust panic with one of their own
        raise Broken(type(error).__name__, f": {str(error)[:200]}", _place(error)) from error
    return True


def _place(error: BaseException) -> str:
    """The last line of this project's own by which the error came."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(frames) if "/meshwright/" in frame.filename), frames[-1])
    return f"{ours.filename.partition('/src/')[2] or ours.filename}:{ours.lineno} {ours.name}"


@contextmanager
def _bounded_work() -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise Endless

    before, frames = signal.signal(signal.SIGVTALRM, end), sys.getrecursionlimit()
    sys.setrecursionlimit(sum(1 for _ in traceback.walk_stack(None)) + FRAMES)
    signal.setitimer(signal.ITIMER_VIRTUAL, WORK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        sys.setrecursionlimit(frames)
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
