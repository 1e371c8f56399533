"""What a run that goes on has to go on from: its newest complete checkpoint, and how far it had come without one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.run.files import load_design
from meshwright.run.outcome import Ended, read_ended
from meshwright.search.runtime_rules import EIGHT_BIT_GRADIENTS
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Interval, JobSpec
from meshwright.spec.json_text import parse_json
from meshwright.spec.plan import Design, Plan
from meshwright.train.interval import MEASURING_STEPS
from meshwright.train.learning_rate import learning_rate

_NOTICED = 0.05  # of a learning rate
_UNSAID = ("plan.gradients", "plan.sequence_length", "plan.model", "plan.cluster")  # by Plan.describe


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


def nothing_left(run_dir: Path, design: Design) -> Ended | None:
    """How the run in `run_dir` ended, where no step of `design` is left to train and its last state is whole; else
    None."""
    from meshwright.train.checkpoint import newest

    ended, last = read_ended(run_dir), design.job.total_steps
    if ended is None or ended.step < last:
        return None
    found = newest(run_dir / "checkpoints").checkpoint
    return ended if found is not None and found.step >= last else None


def is_done(run_dir: Path, design: Design) -> Problem:
    """That no step of `design` is left to train in `run_dir`, and what would go on."""
    what = f"all {design.job.total_steps:,} steps are done and none is left to train"
    return Problem(what=what, where=str(run_dir), fix="--set job.total_tokens=... makes the run longer")


def going_on(run_dir: Path, design: Design) -> list[str]:
    """What a person should know of the run in `run_dir` as it goes on by `design`, a line each. Raises as
    `check_resumable` does."""
    from meshwright.train.checkpoint import newest

    begins = check_resumable(run_dir)
    lines, before = [begins] if begins else [], load_design(run_dir / "design.json")
    lines += changes(before, design)
    found = newest(run_dir / "checkpoints").checkpoint
    lines += _rate_change(before.job, design.job, step=found.step) if found is not None else []
    return lines


def changes(before: Design, after: Design) -> list[str]:
    """A line for each thing of the plan and the job that is another from here on than it was until now."""
    old, new = (dict(_fields(codec.encode(design.job), "job")) for design in (before, after))
    lines = [
        f"{path} is {_shown(new.get(path))} from here on; it was {_shown(old.get(path))}"
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]
    return [*_plan_changes(before.plan, after.plan), *_left_behind(before.plan, after.plan), *lines]


def _rate_change(before: JobSpec, after: JobSpec, *, step: int) -> list[str]:
    """That the learning rate jumps after `step`, where it does: what its schedule is of may be another."""
    if step >= after.total_steps:
        return []
    was, now = (
        learning_rate(step, shape=job.learning_rate, peak=job.optimizer.learning_rate, total_steps=job.total_steps)
        for job in (before, after)
    )
    if abs(now - was) <= _NOTICED * max(was, now):
        return []
    return [f"the learning rate is {now:.2e} in step {step + 1:,}; by the job until now it was {was:.2e}"]


def _left_behind(before: Plan, after: Plan) -> list[str]:
    """What was kept of gradients that did not travel whole is owed between the ranks of one plan."""
    met = before.gradients
    how = met.precision.value if met.compression is None else met.compression.words
    keeps = met.compression is not None or met.precision in EIGHT_BIT_GRADIENTS
    if not keeps or before.digest() == after.digest():
        return []
    return [f"what was still to be sent of gradients that met in {how} is dropped: it was of the plan until now"]


def _plan_changes(before: Plan, after: Plan) -> list[str]:
    """The two plans in words, and the fields that differ and that those words do not tell."""
    lines, alike = [], before.describe() == after.describe()
    if not alike:
        lines.append(f"the plan is {after.describe()} from here on; it was {before.describe()}")
    frozen, was = (_blocks(plan.frozen_blocks) for plan in (after, before))
    if frozen != was:
        lines.append(f"frozen blocks are {frozen} from here on; they were {was}")
    old, new = (dict(_leaves(codec.encode(plan), "plan")) for plan in (before, after))
    differ = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
    differ = [path for path in differ if not path.endswith(".training") and (alike or path.startswith(_UNSAID))]
    lines += [f"{path} is {_shown(new.get(path))} from here on; it was {_shown(old.get(path))}" for path in differ[:8]]
    return lines + ([f"{len(differ) - 8} more fields of the plan differ"] if len(differ) > 8 else [])


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """As `_fields`, and of every entry of a list by its place."""
    if not isinstance(value, list):
        for inside, entry in _fields(value, path):
            yield from _leaves(entry, inside) if isinstance(entry, list) else ((inside, entry),)
        return
    for place, entry in enumerate(value):
        yield from _leaves(entry, f"{path}[{place}]")


def _blocks(numbers: Collection[int]) -> str:
    """`1 to 3 and 7`; `none`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "none"


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
            row = parse_json(line)
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
    spec = load_design(run_dir / "design.json").job.checkpoint
    every = MEASURING_STEPS if spec.interval is Interval.GOODPUT else spec.every_steps
    return bool(every) and reached >= every
