"""From the name of a schedule to its table, its placement of stages and its bubble."""

from __future__ import annotations

from meshwright.schedule.gpipe import gpipe
from meshwright.schedule.interleaved import interleaved
from meshwright.schedule.one_f_one_b import one_f_one_b
from meshwright.schedule.table import Table
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import ScheduleKind

_BUILT = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)


def problems(kind: ScheduleKind, *, pipeline: int, chunks: int, microbatches: int) -> tuple[Problem, ...]:
    """Every reason why there is no such schedule; () when `build` gives one."""
    found = [
        Problem(what=f"{value} is not a number of {name}", where=f"schedule.{name}", fix="at least 1")
        for name, value in (("pipeline", pipeline), ("chunks", chunks), ("microbatches", microbatches))
        if value < 1
    ]
    if kind not in _BUILT:
        found.append(Problem(what=f"{kind.value} has no table yet", where="schedule.kind"))
    if kind is not ScheduleKind.INTERLEAVED and chunks > 1:
        found.append(
            Problem(
                what=f"{kind.value} runs one stage on each rank, not {chunks}",
                where="schedule.chunks",
                fix=f"1 chunk, or kind {ScheduleKind.INTERLEAVED.value}",
            )
        )
    if kind is ScheduleKind.INTERLEAVED and not found and microbatches % pipeline:
        down = microbatches // pipeline * pipeline
        nearest = f"{down} or {down + pipeline}" if down else str(pipeline)
        found.append(
            Problem(
                what=f"{microbatches} microbatches are not a multiple of {pipeline} pipeline ranks",
                where="schedule.microbatches",
                why="interleaved schedules move microbatches in groups of one per rank",
                fix=f"{nearest} microbatches",
            )
        )
    return tuple(found)


def build(kind: ScheduleKind, *, pipeline: int, chunks: int, microbatches: int) -> Table:
    """The table of `kind`: legal by `check`, one row a pipeline rank. Raises ConfigError with every problem."""
    found = problems(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    if found:
        raise ConfigError(found)
    if kind is ScheduleKind.GPIPE:
        return gpipe(pipeline=pipeline, microbatches=microbatches)
    if kind is ScheduleKind.ONE_F_ONE_B:
        return one_f_one_b(pipeline=pipeline, microbatches=microbatches)
    return interleaved(pipeline=pipeline, chunks=chunks, microbatches=microbatches)


def stage_rank(kind: ScheduleKind, stage: int, *, pipeline: int, chunks: int) -> int:
    """The pipeline rank that holds `stage`: ranks in a loop for every kind there is."""
    assert 0 <= stage < pipeline * chunks, f"{kind.value} of {pipeline} x {chunks} has no stage {stage}"
    return stage % pipeline


def bubble_fraction(kind: ScheduleKind, *, pipeline: int, chunks: int, microbatches: int) -> float:
    """Idle share of a step of equal stages without transfers: (p - 1) / (v m + p - 1), v being 1 but for interleaved.

    2104.04473 gives the same bubble over the ideal time, (p - 1) / (v m).
    """
    found = problems(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    if found:
        raise ConfigError(found)
    return (pipeline - 1) / (chunks * microbatches + pipeline - 1)
