"""A run held against one that nothing was done to: the loss of every step, and the bits of the last checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from meshwright.parallel import stored
from meshwright.run.elastic.epochs import plans_of
from meshwright.run.files import load_design
from meshwright.spec.chaos import Curve
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.goodput import Moment
from meshwright.spec.json_text import parse_json
from meshwright.train.checkpoint.find import newest
from meshwright.train.observe.timekeeper import marks_of

# Of runs that went through unlike layouts, or that are not deterministic: what rounding may do to a loss.
_TOLERANCES = {Precision.FP64: 1e-9, Precision.FP32: 1e-4}
_COARSE = 2e-2


def compare(run_dir: Path, against: Path) -> Curve:
    """A deterministic run that stayed on one plan must be the same bit by bit; any other within what rounding does."""
    ours, theirs = losses(run_dir), losses(against)
    both = sorted(ours.keys() & theirs.keys())
    return Curve(
        against=str(against),
        steps=len(both),
        worst=max((_apart(ours[step], theirs[step]) for step in both), default=0.0),
        tolerance=_tolerance(run_dir, against),
        missing=tuple(sorted(ours.keys() ^ theirs.keys())),
        same_state=_same_state(run_dir, against),
    )


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of every step in the metrics of a run; the last row of a step counts."""
    path = run_dir / "metrics.jsonl"
    found = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            row = parse_json(line)
            found[int(row["step"])] = float(row["loss"])
    return found


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def _tolerance(run_dir: Path, against: Path) -> float:
    design = load_design(against / "design.json")
    plans = {mark.plan for run in (run_dir, against) for mark in marks_of(run) if mark.what is Moment.LAUNCHED}
    plans |= {plan for run in (run_dir, against) for plan in plans_of(run)}
    if design.job.deterministic and len(plans) <= 1:
        return 0.0
    precisions = {group.precision for stage in design.plan.stages for group in stage.groups}
    return max(_TOLERANCES.get(precision, _COARSE) for precision in precisions)


def _same_state(run_dir: Path, against: Path) -> bool | None:
    ours, theirs = (newest(run / "checkpoints").checkpoint for run in (run_dir, against))
    if ours is None or theirs is None or ours.step != theirs.step:
        return None
    try:
        sums = [stored.sums(checkpoint.path) for checkpoint in (ours, theirs)]
    except (OSError, ConfigError):
        return None
    return sums[0] == sums[1] if sums[0].keys() == sums[1].keys() else None
