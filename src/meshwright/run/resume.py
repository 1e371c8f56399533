"""What a run that goes on has to go on from: its newest complete checkpoint, and how far it had come without one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.run.files import load_design
from meshwright.run.outcome import read_ended
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design


def check_resumable(run_dir: Path) -> str | None:
    """None when the run in `run_dir` has a checkpoint to go on from, by its marker, manifest and file sizes.

    A run that never saved one begins at its first step again, which is the line returned. Raises ConfigError when it
    has trained steps and saved checkpoints, and none that is complete is left: beginning again would lose them unsaid.
    """
    from meshwright.train.checkpoint import is_corrupt, newest

    directory = run_dir / "checkpoints"
    found = newest(directory)
    if found.checkpoint is not None:
        return None
    reached = steps_of(run_dir)
    spoilt = [problem for problem in found.skipped if is_corrupt(problem)]
    if spoilt or (_has_saved(run_dir, reached=reached) and not found.skipped):
        raise ConfigError(
            Problem(
                what=f"the run reached step {reached:,} and no complete checkpoint of it is left",
                where=str(directory),
                why="; ".join(f"{Path(problem.where).name} is corrupt: {problem.why}" for problem in spoilt)
                or "the folder is empty or gone",
                fix="put a checkpoint back there, or train again from the first step: --run names another directory",
            )
        )
    past = f"it reached step {reached:,} and" if reached else "it"
    return f"nothing to go on from: {past} never saved a checkpoint; the run begins at step 0"


def changes(before: Design, after: Design) -> list[str]:
    """A line for each thing of the plan and the job that is another from here on than it was until now."""
    old, new = (dict(_fields(codec.encode(design.job), "job")) for design in (before, after))
    lines = [
        f"{path} is {_shown(new.get(path))} from here on; it was {_shown(old.get(path))}"
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]
    if before.plan != after.plan:
        lines.insert(0, f"the plan is {after.plan.describe()} from here on; it was {before.plan.describe()}")
    return lines


def _fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every field of a document by its path; a list is one."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, entry in value.items():
        yield from _fields(entry, f"{path}.{name}")


def _shown(value: Any) -> str:
    return "not there" if value is None else json.dumps(value)


def steps_of(run_dir: Path) -> int:
    """The last step in the metrics of a run; 0 when there is none."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    last = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "loss" in row and isinstance(row.get("step"), int):
            last = max(last, row["step"])
    return last


def _has_saved(run_dir: Path, *, reached: int) -> bool:
    """A run that ended well saved its last step; one that failed had saved when it was past a step to save at."""
    ended = read_ended(run_dir)
    if ended is not None and ended.step:
        return True
    every = load_design(run_dir / "design.json").job.checkpoint.every_steps
    return bool(every) and reached >= every
