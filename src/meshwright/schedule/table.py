"""The table of a pipeline schedule: what every rank does, in order; its legality, its memory and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.schedule.paths import Path, Paths, around
from meshwright.spec.errors import Problem


class Work(StrEnum):
    """A pass of one microbatch through one stage: forward, whole backward, or backward in two halves.

    INPUT is the half that the stage before waits for, WEIGHT the half that nobody waits for (2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """`slice` is the run of tokens of the microbatch; 0 where schedules do not cut microbatches."""

    work: Work
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}" + (f".{self.slice}" if self.slice else "")


Table = tuple[tuple[Action, ...], ...]

_Key = tuple[Work, int, int, int]


def in_flight(table: Table) -> tuple[int, ...]:
    """For every rank, the largest number of (stage, microbatch, slice) activations it holds at once.

    A forward adds one; the backward, or its WEIGHT half, frees it.
    """
    peaks = []
    for row in table:
        live = peak = 0
        for action in row:
            if action.work is Work.FORWARD:
                live += 1
                peak = max(peak, live)
            elif action.work is not Work.INPUT:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def to_csv(table: Table) -> str:
    """One line a rank, one cell an action (`0F3`: stage 0, forward, microbatch 3): what torch's runtime loads.

    A slice after the first is written `0F3.1`, which that runtime does not know.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def needs(action: Action, *, stages: int, slices: int = 1, path: Path | None = None) -> tuple[_Key, ...]:
    """What must be finished before `action` may start, as (work, stage, microbatch, slice); BACKWARD is INPUT too.

    `path` is its microbatch's, None where that passes every stage in turn.

    Attention is causal: a slice's forward reads the keys of the slices before it, its backward adds to their
    gradients, so that slices go forward in order and backward in reverse (2406.03488).
    """
    stage, microbatch, part = action.stage, action.microbatch, action.slice
    before, behind = around(path, stage, stages=stages)
    if action.work is Work.FORWARD:
        below = ((Work.FORWARD, before, microbatch, part),) if before >= 0 else ()
        return (*below, *(((Work.FORWARD, stage, microbatch, part - 1),) if part else ()))
    if action.work is Work.WEIGHT:
        return ((Work.BACKWARD, stage, microbatch, part),)
    above = ((Work.BACKWARD, behind, microbatch, part),) if behind < stages else ()
    after = ((Work.BACKWARD, stage, microbatch, part + 1),) if part + 1 < slices else ()
    return ((Work.FORWARD, stage, microbatch, part), *above, *after)


def misplaced(table: Table, placement: Sequence[int]) -> list[Problem]:
    """Actions of stages that do not exist or that another rank holds."""
    problems = []
    for rank, row in enumerate(table):
        for index, action in enumerate(row):
            where = f"table[{rank}][{index}]"
            if not 0 <= action.stage < len(placement):
                problems.append(Problem(what=f"{action} is of a stage that does not exist", where=where))
            elif placement[action.stage] != rank:
                holder = placement[action.stage]
                problems.append(
                    Problem(what=f"{action} is on the wrong rank", where=where, fix=f"rank {holder} holds the stage")
                )
    return problems


def incomplete(table: Table, *, stages: int, paths: Paths = ()) -> list[Problem]:
    """What is done twice, or not at all, or off the path of its microbatch."""
    counts: dict[Action, int] = {}
    for row in table:
        for action in row:
            counts[action] = counts.get(action, 0) + 1
    problems = [
        Problem(what=f"{action} is done {count} times", where="table") for action, count in counts.items() if count > 1
    ]
    if paths:
        astray = [action for action in counts if not _is_on(paths, action)]
        problems += [Problem(what=f"{action} is not on the microbatch's path", where="table") for action in astray]
    microbatches = len(paths) or 1 + max((action.microbatch for action in counts), default=0)
    slices = 1 + max((action.slice for action in counts), default=0)
    done: dict[tuple[int, int, int], set[Work]] = {}
    for action in counts:
        done.setdefault((action.stage, action.microbatch, action.slice), set()).add(action.work)
    for stage in range(stages):
        for index in range(microbatches * slices):
            microbatch, part = divmod(index, slices)
            if paths and stage not in paths[microbatch]:
                continue
            works = done.get((stage, microbatch, part), set())
            backward = works - {Work.FORWARD}
            name = f"stage {stage}, microbatch {microbatch}" + (f", slice {part}" if slices > 1 else "")
            if Work.FORWARD not in works:
                problems.append(Problem(what=f"{name}: the forward is missing", where="table"))
            if backward not in ({Work.BACKWARD}, {Work.INPUT, Work.WEIGHT}):
                told = "".join(sorted(work.value for work in backward)) or "missing"
                fix = "one B, or one I and one W"
                problems.append(Problem(what=f"{name}: the backward is {told}", where="table", fix=fix))
    return problems


def _is_on(paths: Paths, action: Action) -> bool:
    return action.microbatch < len(paths) and action.stage in paths[action.microbatch]


def disordered(table: Table, *, stages: int, paths: Paths = ()) -> list[Problem]:
    """Actions that come before one of the same rank and stage that they need."""
    slices = 1 + max((action.slice for row in table for action in row), default=0)
    problems = []
    for rank, row in enumerate(table):
        seen: set[_Key] = set()
        for index, action in enumerate(row):
            if paths and not _is_on(paths, action):
                continue
            path = paths[action.microbatch] if paths else None
            for key in needs(action, stages=stages, slices=slices, path=path):
                work, stage, microbatch, part = key
                if stage == action.stage and key not in seen:
                    half = action.work is Work.WEIGHT or (work is Work.BACKWARD and action.work is Work.INPUT)
                    told = Work.INPUT if half else work
                    needed = Action(work=told, stage=stage, microbatch=microbatch, slice=part)
                    problems.append(Problem(what=f"{action} comes before {needed}", where=f"table[{rank}][{index}]"))
            work = Work.BACKWARD if action.work is Work.INPUT else action.work
            seen.add((work, action.stage, action.microbatch, action.slice))
    return problems
