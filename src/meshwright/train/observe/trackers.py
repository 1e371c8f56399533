"""Trackers: where metrics go. JSONL always; TensorBoard and Weights & Biases (offline) when asked for by name."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.json_text import parse_json

Values = Mapping[str, float | int | None]


class Tracker(Protocol):
    """Five methods; only rank 0 calls them. A value of None is a number that is not known and is left out."""

    def start(self, config: Mapping[str, Any], *, step: int) -> None:
        """The run begins or goes on after `step`; what is kept of later steps is from a lost past."""

    def log(self, values: Values, *, step: int) -> None:
        """Keep these numbers of `step`."""

    def summarise(self, values: Values) -> None:
        """Keep the numbers that stand for the whole run."""

    def attach(self, path: Path) -> None:
        """Keep a file beside the run."""

    def finish(self) -> None:
        """Nothing more follows, and all that was given is on disk."""


def last_step(run_dir: Path) -> int:
    """The last step in the metrics of a run; 0 where there is none."""
    steps = (_step_of(line) for line in reversed(_lines(run_dir / "metrics.jsonl")) if '"loss"' in line)
    return next((int(step) for step in steps if math.isfinite(step)), 0)


class JsonLines:
    """`metrics.jsonl`: one object a line, flushed at once; `summary.json` at the end.

    What JSON has no number for, such as a loss that is not finite, is null. Where the run directory is deleted or moved
    away and made again, the file is there again with all that was in it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "metrics.jsonl"
        self._summary: dict[str, Any] = {}
        self._files: list[str] = []

    def start(self, config: Mapping[str, Any], *, step: int) -> None:
        kept = [line for line in _lines(self.path) if _step_of(line) <= step]
        fresh = self.path.with_suffix(".partial")
        fresh.write_text("".join(f"{line}\n" for line in kept))
        fresh.replace(self.path)
        self._file = self.path.open("a+")

    def log(self, values: Values, *, step: int) -> None:
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
        self._return()
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def summarise(self, values: Values) -> None:
        self._summary.update(values)

    def attach(self, path: Path) -> None:
        self._files.append(path.name)

    def finish(self) -> None:
        self._return()
        self._file.close()
        document = {**self._summary, "files": self._files}
        self.path.with_name("summary.json").write_text(json.dumps(document, indent=1) + "\n")

    def _return(self) -> None:
        """What was written is in the file, where its folder was made again without it."""
        if self.path.exists() or not self.path.parent.is_dir():
            return
        with suppress(FileNotFoundError):  # the folder is gone once more
            fresh = self.path.with_suffix(".partial")
            with fresh.open("w") as file:
                self._file.seek(0)
                shutil.copyfileobj(self._file, file)
            fresh.replace(self.path)
            self._file.close()
            self._file = self.path.open("a+")


class TensorBoard:
    """Scalars and the run's configuration under `RUN/tensorboard`."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_type, self._folder = SummaryWriter, run_dir / "tensorboard"

    def start(self, config: Mapping[str, Any], *, step: int) -> None:
        self._writer = self._writer_type(log_dir=str(self._folder), purge_step=step + 1)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", step)

    def log(self, values: Values, *, step: int) -> None:
        for name, value in known(values).items():
            self._writer.add_scalar(name, value, step)

    def summarise(self, values: Values) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in known(values).items())
        self._writer.add_text("summary", f"| name | value |\n|---|---|\n{rows}")

    def attach(self, path: Path) -> None:
        self._writer.add_text("files", str(path))

    def finish(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run under `RUN/wandb`, kept offline: `wandb sync` sends it when the user wants that."""

    def __init__(self, run_dir: Path) -> None:
        import wandb

        self._wandb, self._run_dir = wandb, run_dir

    def start(self, config: Mapping[str, Any], *, step: int) -> None:
        settings = self._wandb.Settings(silent=True)
        self._run = self._wandb.init(
            mode="offline",
            project="meshwright",
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=dict(config),
            settings=settings,
        )

    def log(self, values: Values, *, step: int) -> None:
        self._run.log(known(values), step=step)

    def summarise(self, values: Values) -> None:
        self._run.summary.update(known(values))

    def attach(self, path: Path) -> None:
        shutil.copy(path, self._run.dir)

    def finish(self) -> None:
        self._run.finish()


class Composite:
    """All trackers of a run as one."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def start(self, config: Mapping[str, Any], *, step: int) -> None:
        for tracker in self._trackers:
            tracker.start(config, step=step)

    def log(self, values: Values, *, step: int) -> None:
        for tracker in self._trackers:
            tracker.log(values, step=step)

    def summarise(self, values: Values) -> None:
        for tracker in self._trackers:
            tracker.summarise(values)

    def attach(self, path: Path) -> None:
        for tracker in self._trackers:
            tracker.attach(path)

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def kinds() -> dict[str, Callable[[Path], Tracker]]:
    """Every tracker by the name that `job.trackers` takes."""
    return {"jsonl": JsonLines, "tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check(names: Iterable[str]) -> None:
    """Nothing, when every named tracker can be built here.

    Raises ConfigError with every unknown name and the nearest known one, EnvironmentUnfit when a package that a
    tracker needs is not installed.
    """
    known_kinds = kinds()
    problems = [
        Problem(
            what=f"tracker {name!r} is unknown", where=f"job.trackers[{index}]", fix=nearest(name, sorted(known_kinds))
        )
        for index, name in enumerate(names)
        if name not in known_kinds
    ]
    if problems:
        raise ConfigError(problems)
    for name in names:
        if name != "jsonl" and not _installed(name):
            raise EnvironmentUnfit(
                Problem(
                    what=f"the package {name} is not installed",
                    where="job.trackers",
                    fix="pip install 'meshwright[track]', or leave that tracker out",
                )
            )


def build(names: Iterable[str], *, run_dir: Path) -> Composite:
    """JSONL and the named trackers; raises as `check` does."""
    names = tuple(names)
    check(names)
    return Composite(kinds()[name](run_dir) for name in dict.fromkeys(("jsonl", *names)))


def known(values: Values) -> dict[str, float | int]:
    return {name: value for name, value in values.items() if value is not None}


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return False


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def _step_of(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return float("inf")
