"""A run directory that is moved away or deleted while the run goes on is made again, so that the run can be resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from meshwright.spec.plan import Design
from meshwright.train.events import Action, Event, Log, Saved
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.whereabouts import Marker

KEPT = (
    "predicted.json",
    "decision.json",
    "environment.json",
    "corpus.json",
    "tokenizer.json",
    "goodput.jsonl",
    "incidents.jsonl",
)


class MovedAway:
    """With every checkpoint, which makes its own folder, rank 0 sees to it that `run_dir` holds the design too, and
    what else is told of the run: those files are held open, and what is in them outlives their names."""

    def __init__(self, run_dir: Path, *, design: Design) -> None:
        self._run_dir, self._design = run_dir, design
        self._open: dict[str, BinaryIO] = {}
        self._hold()

    def react(self, event: Event) -> Iterable[Action]:
        if not isinstance(event, Saved):
            return
        if (self._run_dir / "design.json").is_file():
            self._hold()
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for name, stream in self._open.items():
            self._write_again(name, stream)
        self._open.clear()
        fresh = self._run_dir / "design.json.partial"
        fresh.write_text(self._design.to_json())
        fresh.replace(self._run_dir / "design.json")
        self._hold()
        yield Log(
            text=f"{self._run_dir} was gone and is made again: --resume goes on from what is saved there. Metrics, "
            "times and what is told of the run are there as they were; checkpoints, spans, logs and files of trackers "
            "from before are where that directory is now, and lost where it was deleted"
        )

    def _hold(self) -> None:
        for name in KEPT:
            if name not in self._open:
                with suppress(OSError):
                    self._open[name] = (self._run_dir / name).open("rb")

    def _write_again(self, name: str, stream: BinaryIO) -> None:
        """What was in the file, and after it what was added since the directory is there again."""
        path = self._run_dir / name
        since = path.read_bytes() if path.is_file() else b""
        fresh = path.with_name(f"{name}.again")
        with stream, fresh.open("wb") as file:
            stream.seek(0)
            shutil.copyfileobj(stream, file)
            file.write(since)
        fresh.replace(path)


class Stays:
    """With every checkpoint each rank sees to it that others find where it is, and in which collective."""

    def __init__(self, *, marker: Marker | None, log: CollectiveLog | None) -> None:
        self._marker, self._log = marker, log

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Saved):
            if self._marker is not None:
                self._marker.stay()
            if self._log is not None:
                self._log.stay()
        return ()
