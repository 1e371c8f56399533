"""Lost: what of a job no flag of a trainer says, told in the same way for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.export.compare import Line, Verdict
from meshwright.spec.job import Interval
from meshwright.spec.plan import Design

Words = tuple[str, str, str]


def lost_lines(words: Iterable[Words]) -> tuple[Line, ...]:
    """A line for each name, word of the plan and word of the trainer."""
    return tuple(Line(name=name, plan=plan, peer=peer, verdict=Verdict.LOST) for name, plan, peer in words)


def lost_start(design: Design, *, fix: str) -> list[Words]:
    """The weights that the job begins with."""
    return [("first weights", design.job.start, f"drawn anew; {fix}")] if design.job.start else []


def lost_checkpoints(design: Design, *, folder: str, kept: str, fix: str) -> list[Words]:
    """Where checkpoints lie and which of them stay, or that there are none: `fix` says what would save."""
    spec = design.job.checkpoint
    if spec.every_steps and spec.interval is Interval.STEPS:
        places = ("checkpoint folder", "the run directory", f"{folder}, which all nodes have to see")
        return [places, *([("checkpoints kept", str(spec.keep or "all"), kept)] if kept else [])]
    when = "as often as wastes least" if spec.interval is Interval.GOODPUT else "at the end and on a signal"
    return [("checkpoints", when, f"none; {fix}")]


def evaluation_words(design: Design) -> str:
    """`every 500 steps of 65,536 tokens`."""
    spec = design.job.evaluation
    when = f"every {spec.every_steps:,} steps" if spec.every_steps else "at the end"
    return f"{when}, of {spec.tokens:,} tokens"


def saves_every(design: Design) -> int:
    """The steps between checkpoints where the job says them; 0 where it does not."""
    spec = design.job.checkpoint
    return spec.every_steps if spec.interval is Interval.STEPS else 0
