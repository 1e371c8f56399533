"""Timekeeper: marks in `RUN/goodput.jsonl` of what a run is at, so that every second of all its launches is known."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from textwrap import shorten

from meshwright.spec.codec import decode
from meshwright.spec.errors import ConfigError, MeshwrightError
from meshwright.spec.goodput import Account, Goodput, Mark, Moment, account
from meshwright.spec.json_text import parse_json
from meshwright.train.events import (
    Action,
    Evaluate,
    Event,
    Replan,
    RollBack,
    Save,
    Started,
    StepDone,
    StepSpoilt,
    Stopping,
)
from meshwright.train.observe.trackers import last_step

MARK_SECONDS = 2.0
_WARM_STEPS = 5
_USUAL_STEPS = 33
_SLOW = 2.0
_MOST_WORDS = 200
_CHOSEN = "a change that was not worth it was taken back"
_MOMENTS: dict[type[Action], Moment] = {
    Evaluate: Moment.EVALUATED,
    Save: Moment.SAVED,
    RollBack: Moment.ROLLED_BACK,
    Replan: Moment.REPLANNED,
}


def path_of(run_dir: Path) -> Path:
    return run_dir / "goodput.jsonl"


def note(run_dir: Path, mark: Mark) -> None:
    """The mark is in the file, whole. A file system that cannot take it loses this figure and nothing else."""
    told = {item.name: getattr(mark, item.name) for item in fields(Mark)}
    plain = {item.name: item.default for item in fields(Mark) if item.default is not MISSING}
    line = json.dumps({name: value for name, value in told.items() if name not in plain or value != plain[name]})
    with suppress(OSError), path_of(run_dir).open("ab+") as file:
        cut_off = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write((b"\n" if cut_off else b"") + line.encode() + b"\n")


def marks_of(run_dir: Path) -> list[Mark]:
    """Every mark of a run, in order; a line that a writer did not finish is left out, its time is of the next one."""
    path = path_of(run_dir)
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, ConfigError):
            mark = decode(Mark, parse_json(line))
            if math.isfinite(mark.at) and (mark.what is not Moment.STEPS or mark.first <= mark.step):
                found.append(mark)
    return found


def goodput_of(run_dir: Path) -> Goodput | None:
    """What the time of the run in `run_dir` went to until its newest mark; None where it kept none."""
    return account(marks_of(run_dir))


def note_launch(run_dir: Path, *, plan: str, began: float) -> None:
    """This launch, which began at `began`, is marked, unless what launched this process has done so."""
    marks = marks_of(run_dir)
    if not marks or marks[-1].what is not Moment.LAUNCHED:
        note(run_dir, launched(run_dir, plan=plan, at=began))


def launched(run_dir: Path, *, plan: str, at: float) -> Mark:
    """That a launch began at `at`, before it has taken anything out of the metrics."""
    return Mark(what=Moment.LAUNCHED, at=at, plan=plan, step=last_step(run_dir))


def steady_clock() -> Callable[[], float]:
    """The system clock as it is now, from here on moved by nothing but time."""
    offset = time.time() - time.perf_counter()
    return lambda: time.perf_counter() + offset


def first_line(error: BaseException) -> str:
    """What is kept of an error that ended a run: what its first problem is, in whole words."""
    told = str(error)
    if isinstance(error, MeshwrightError) and error.problems:
        told = str(replace(error.problems[0], why="", fix=""))
    line = (told.strip() or type(error).__name__).splitlines()[0]
    return shorten(line, width=_MOST_WORDS, placeholder=" ...")


def _passed_over(event: Started) -> list[str]:
    return [f"{problem}, passed over" for problem in event.passed_over]


class Timekeeper:
    """On rank 0: marks what the run was at, step after step, and adds it up with what the launches before marked.

    Steps are marked together, every `MARK_SECONDS` and before anything else is. Those that took more than twice the
    median of the steps about them have been slow, by what they took beyond it.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] | None = None) -> None:
        self._run_dir, self._now = run_dir, clock or steady_clock()
        self._account = Account()
        for mark in marks_of(run_dir):
            self._account.add(mark)
        self._before = self._now()
        self._steps: list[tuple[float, float]] = []
        self._usual: deque[float] = deque(maxlen=_USUAL_STEPS)
        self._seen = 0
        self._last = 0

    @property
    def ettr(self) -> float:
        """The useful share of the run's time until the newest step."""
        more = self._before - self._account.at
        return self._account.ettr(useful=sum(each - data for each, data in self._steps), more=max(more, 0.0))

    @property
    def summary(self) -> dict[str, float]:
        """Seconds of each kind through all launches until now, all of them, and the useful share."""
        seconds = {f"{kind.name.lower()}_seconds": each for kind, each in self._account.seconds.items() if each}
        return {**seconds, "wall_seconds": sum(seconds.values()), "ettr": self._account.ettr()}

    def see(self, event: Event) -> None:
        """The time up to now is of what the event says was done."""
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Started) and event.why:
            why = "; ".join((event.why, *_passed_over(event)))
            self._mark(Moment.REGROUPED, step=event.step, asked=not event.lost, why=why)
        elif isinstance(event, Started):
            self._mark(Moment.STARTED, step=event.step, why="; ".join(_passed_over(event)))
        elif isinstance(event, StepSpoilt):
            self._mark(Moment.SPOILT, step=event.step - 1)
        elif isinstance(event, Stopping):
            self._flush()

    def did(self, action: Action, *, step: int) -> None:
        """The time up to now is of `action`, after which the run stands at `step`."""
        moment = _MOMENTS.get(type(action))
        if moment is not None:
            chosen = isinstance(action, RollBack) and action.to is not None
            self._mark(moment, step=step, why=_CHOSEN if chosen else "")

    def leave(self) -> None:
        """Another one goes on with the marks of this launch."""
        self._flush()

    def end(self, *, asked: bool = False, why: str = "") -> None:
        """The process is about to end."""
        if why:
            self._flush()
        self._mark(Moment.ENDED, step=self._last, asked=asked, why=why)

    def _step(self, event: StepDone) -> None:
        now = self._now()
        self._steps.append((now - self._before, event.input_seconds))
        self._usual.append(now - self._before)
        self._before, self._last = now, event.step
        self._seen += 1
        if self._seen >= _WARM_STEPS and now - self._account.at >= MARK_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if not self._steps:
            return
        usual = statistics.median(self._usual)
        slow = sum(each - usual for each, _ in self._steps if each > _SLOW * usual)
        first, data = self._last - len(self._steps) + 1, sum(data for _, data in self._steps)
        self._steps.clear()
        self._keep(
            Mark(
                what=Moment.STEPS,
                at=self._before,
                step=self._last,
                first=first,
                data_seconds=round(data, 6),
                slow_seconds=round(slow, 6),
            )
        )

    def _mark(self, what: Moment, *, step: int, asked: bool = False, why: str = "") -> None:
        self._flush()
        self._before, self._last = self._now(), step
        self._keep(Mark(what=what, at=self._before, step=step, asked=asked, why=why))

    def _keep(self, mark: Mark) -> None:
        self._account.add(mark)
        note(self._run_dir, mark)
