"""Where every rank is: the step and the section it is in, in a file of its own that is there when the rank is not."""

from __future__ import annotations

import json
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from meshwright.spec.json_text import parse_json

_SIZE = 160


class Section(StrEnum):
    """What a rank is at."""

    BUILD = "building the run"
    INPUT = "reading data"
    MODEL = "forward and backward"
    NORM = "norm of the gradients"
    OPTIMIZER = "optimizer"
    AGREE = "end of the step"
    EVALUATE = "evaluation"
    SAVE = "checkpoint"
    COPY = "copy of the state"
    RESTORE = "roll back"
    REPLAY = "replay of a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """A rank is, or was last seen, in this section of this step, as process `process` of its host (0: not known).

    It said so `at` that time, in seconds of its system's clock (0: not known).
    """

    step: int
    section: Section
    process: int = 0
    at: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"step {self.step}, {self.section.value}"


class Marker:
    """Keeps `RUN/whereabouts/rank-00000.json` true. A mark is a write to memory that the system brings to the file,
    whatever becomes of this process.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self.now = Whereabouts(step=0, section=Section.BUILD)
        self._process = os.getpid()
        self._memory: mmap.mmap | None = None
        self._path = path_of(run_dir, rank)
        self._map()
        self.mark(step=0, section=Section.BUILD)

    def mark(self, *, step: int, section: Section) -> None:
        """From here on this rank is in `section` of `step`."""
        self.now = Whereabouts(step=step, section=section)
        if self._memory is not None:
            told = {"step": step, "section": section.value, "process": self._process, "at": round(time.time(), 3)}
            self._memory[:] = json.dumps(told).encode().ljust(_SIZE)

    def beat(self) -> None:
        """This rank gets on in the section that it is in."""
        self.mark(step=self.now.step, section=self.now.section)

    def stay(self) -> None:
        """The file is there, where the run directory was made again without it."""
        if not self._path.is_file():
            self._map()
            self.beat()

    def _map(self) -> None:
        with suppress(OSError):  # a file system that maps no files takes this help away and nothing else
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b" " * _SIZE)
            with self._path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE)


def path_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "whereabouts" / f"rank-{rank:05d}.json"


def last_seen(run_dir: Path, rank: int) -> Whereabouts | None:
    """Where `rank` was when it marked last; None when it never did, or half a mark is there."""
    try:
        value = parse_json(path_of(run_dir, rank).read_bytes())
        section, process = Section(value["section"]), int(value.get("process", 0))
        return Whereabouts(step=int(value["step"]), section=section, process=process, at=float(value.get("at", 0.0)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
