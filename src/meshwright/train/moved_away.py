"""A run directory that is moved away or deleted while the run goes on is made again, so that the run can be resumed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meshwright.spec.plan import Design
from meshwright.train.events import Action, Event, Log, Saved


class MovedAway:
    """With every checkpoint, which makes its own folder, rank 0 sees to it that `run_dir` holds the design too."""

    def __init__(self, run_dir: Path, *, design: Design) -> None:
        self._path, self._design = run_dir / "design.json", design

    def react(self, event: Event) -> Iterable[Action]:
        if not isinstance(event, Saved) or self._path.is_file():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.partial")
        fresh.write_text(self._design.to_json())
        fresh.replace(self._path)
        yield Log(
            text=f"{self._path.parent} was gone and is made again: --resume goes on from what is saved there; "
            "what was written before is where that is now"
        )
