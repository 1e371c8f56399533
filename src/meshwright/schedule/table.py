"""The table of a pipeline schedule: what every rank does, in order; its legality, its memory and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    work: Work
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}"


Table = tuple[tuple[Action, ...], ...]

_Key = tuple[Work, int, int]


def check(table: Table, *, stages: int, placement: Sequence[int] | None = None) -> tuple[Problem, ...]:
    """Every reason why `table` is not a legal schedule of `stages` stages; () when it is.

    Legal means: every stage does every microbatch once forward and once backward (whole, or as two halves), each
    on the rank that holds the stage (`placement[stage]`; the loop `stage % ranks` when None), and the ranks,
    each doing its row in order, all reach the end. Actions out of place are reported before the deadlock they cause.
    """
    places = tuple(placement) if placement is not None else tuple(stage % len(table) for stage in range(stages))
    problems = [*_misplaced(table, places), *_incomplete(table, stages), *_disordered(table)]
    if not problems:
        problems.extend(_deadlocked(table, stages))
    return tuple(problems)


def in_flight(table: Table) -> tuple[int, ...]:
    """For every rank, the largest number of (stage, microbatch) activations it holds at once.

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
    """One line a rank, one cell an action (`0F3`: stage 0, forward, microbatch 3): what torch's runtime loads."""
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def needs(action: Action, *, stages: int) -> tuple[_Key, ...]:
    """What must be finished before `action` may start, as (work, stage, microbatch); BACKWARD stands for INPUT too."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        return ((Work.FORWARD, stage - 1, microbatch),) if stage else ()
    if action.work is Work.WEIGHT:
        return ((Work.BACKWARD, stage, microbatch),)
    above = ((Work.BACKWARD, stage + 1, microbatch),) if stage + 1 < stages else ()
    return ((Work.FORWARD, stage, microbatch), *above)


def _misplaced(table: Table, placement: tuple[int, ...]) -> list[Problem]:
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


def _incomplete(table: Table, stages: int) -> list[Problem]:
    counts: dict[_Key, int] = {}
    for row in table:
        for action in row:
            key = (action.work, action.stage, action.microbatch)
            counts[key] = counts.get(key, 0) + 1
    problems = [
        Problem(what=f"{stage}{work.value}{microbatch} is done {count} times", where="table")
        for (work, stage, microbatch), count in counts.items()
        if count > 1
    ]
    microbatches = 1 + max((microbatch for _, _, microbatch in counts), default=0)
    for stage in range(stages):
        for microbatch in range(microbatches):
            done = {work for work in Work if (work, stage, microbatch) in counts}
            backward = done - {Work.FORWARD}
            name = f"stage {stage}, microbatch {microbatch}"
            if Work.FORWARD not in done:
                problems.append(Problem(what=f"{name}: the forward is missing", where="table"))
            if backward not in ({Work.BACKWARD}, {Work.INPUT, Work.WEIGHT}):
                told = "".join(sorted(work.value for work in backward)) or "missing"
                fix = "one B, or one I and one W"
                problems.append(Problem(what=f"{name}: the backward is {told}", where="table", fix=fix))
    return problems


def _disordered(table: Table) -> list[Problem]:
    """Actions that come before one of the same rank and stage that they need."""
    problems = []
    for rank, row in enumerate(table):
        seen: set[_Key] = set()
        for index, action in enumerate(row):
            first = None if action.work is Work.FORWARD else Work.FORWARD
            first = Work.INPUT if action.work is Work.WEIGHT else first
            if first is not None and (first, action.stage, action.microbatch) not in seen:
                needed = f"{action.stage}{first.value}{action.microbatch}"
                problems.append(Problem(what=f"{action} comes before {needed}", where=f"table[{rank}][{index}]"))
            seen.add((action.work, action.stage, action.microbatch))
    return problems


def _deadlocked(table: Table, stages: int) -> list[Problem]:
    """Where every rank stands when none can go on; [] when all reach the end."""
    done: set[_Key] = set()
    position = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while position[rank] < len(row) and all(key in done for key in needs(row[position[rank]], stages=stages)):
                action = row[position[rank]]
                work = Work.BACKWARD if action.work is Work.INPUT else action.work
                done.add((work, action.stage, action.microbatch))
                position[rank] += 1
                moved = True
    stuck = [rank for rank, row in enumerate(table) if position[rank] < len(row)]
    return [
        Problem(
            what=f"rank {rank} waits for ever at {table[rank][position[rank]]}",
            where=f"table[{rank}][{position[rank]}]",
            why="the ranks wait for each other",
        )
        for rank in stuck
    ]
