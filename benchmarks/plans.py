"""Runs plans through the product's own path and reads back what was predicted and what was measured."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec import codec
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

COMMAND = str(Path(sys.executable).parent / "meshwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One plan that ran: the median of its timed steps, what was predicted, and memory the run allocated."""

    model: str
    plan: str
    world_size: int
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: float
    measured_bytes: float
    tokens_per_second: float
    mfu: float | None
    steps: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1.0

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1.0


def run(design: Design, *, folder: Path, steps: int) -> Measured:
    """Trains `steps` steps on the plan in a process of its own, whose checkpoints are not kept.

    Raises CalledProcessError when the run fails, with the end of what it said.
    """
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(design.to_json())
    command = [COMMAND, "train", str(folder / "plan.json"), "--run", str(folder / "run"), "--steps", str(steps)]
    log = folder / "log.txt"
    with log.open("w") as written:
        ended = subprocess.run(command, check=False, stdout=written, stderr=written)
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    if ended.returncode:
        raise subprocess.CalledProcessError(ended.returncode, command, output=log.read_text()[-2000:])
    predicted = read_report(folder / "run" / "predicted.json")
    measured = read_report(folder / "run" / "measured.json")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = tuple(row["seconds"] for row in rows if "seconds" in row and "loss" in row)
    return Measured(
        model=design.model.name,
        plan=design.plan.describe(),
        world_size=design.plan.world_size,
        predicted_seconds=predicted.step_seconds,
        measured_seconds=measured.step_seconds,
        predicted_bytes=predicted.allocated_bytes,
        measured_bytes=measured.allocated_bytes,
        tokens_per_second=measured.tokens_per_second,
        mfu=measured.mfu,
        steps=seconds,
    )


def read_report(path: Path) -> Report:
    return codec.decode(Report, json.loads(path.read_text()))


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of ranks, ties sharing the mean of theirs."""
    return statistics.correlation(ranks(first), ranks(second))


def ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spread(plans: list[Design], count: int) -> list[Design]:
    """`count` plans at even distances through a list that is sorted by predicted time, both ends among them."""
    if len(plans) <= count:
        return plans
    return [plans[round(index * (len(plans) - 1) / (count - 1))] for index in range(count)]
