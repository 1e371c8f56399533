"""Outcome: how a run ended, what it reached, and what it was predicted and measured to cost."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.run.files import read_json
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, ExitCode
from meshwright.spec.goodput import Goodput, Mark, Moment
from meshwright.spec.report import Report
from meshwright.train.events import Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What rank 0 writes to `RUN/outcome.json` when every rank has ended well.

    `seconds` is of training, evaluations and checkpoints; the validation is of `validation_step`.
    """

    ending: Ending
    step: int
    total_steps: int
    tokens: int
    seconds: float
    loss: float | None = None
    validation_loss: float | None = None
    bits_per_byte: float | None = None
    validation_step: int | None = None
    schema: int = 1

    def mark(self, *, at: float) -> Mark:
        """That the run ended so at `at`, seconds of the system clock."""
        done = self.ending in (Ending.FINISHED, Ending.PAUSED)
        return Mark(what=Moment.ENDED, at=at, step=self.step, asked=True, done=done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that ended well: all its steps done, or stopped with a checkpoint. `measured` is None for a few steps;
    `goodput` is of all launches of the run."""

    run_dir: str
    plan: str
    ended: Ended
    predicted: Report
    measured: Report | None
    goodput: Goodput | None = None
    schema: int = 1

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.SAVED if self.ended.ending is Ending.SIGNALLED else ExitCode.OK

    @property
    def resume_command(self) -> str:
        return f"meshwright train --run {shlex.quote(self.run_dir)} --resume"


def ended_path(run_dir: Path) -> Path:
    return run_dir / "outcome.json"


def read_ended(run_dir: Path) -> Ended | None:
    """How the last launch in `run_dir` ended; None when it did not end well."""
    path = ended_path(run_dir)
    return codec.decode(Ended, read_json(path), str(path)) if path.is_file() else None


def is_finished(run_dir: Path) -> bool:
    """Whether all steps of the run are done."""
    ended = read_ended(run_dir)
    return ended is not None and ended.ending is Ending.FINISHED


def read_report(path: Path) -> Report | None:
    """The report in a file, or None when there is none that can be read."""
    try:
        return codec.decode(Report, read_json(path), str(path))
    except ConfigError:
        return None
