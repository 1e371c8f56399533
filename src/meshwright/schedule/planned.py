"""What a plan's schedule has its ranks do: by the name of its kind, or by the table that it carries."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedule import paths as path_lines
from meshwright.schedule import written
from meshwright.schedule.build import SPLIT
from meshwright.schedule.build import placement as placement_of
from meshwright.schedule.build import problems as problems_of
from meshwright.schedule.build import program as program_of
from meshwright.schedule.program import Program
from meshwright.schedule.table import Table
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Schedule, ScheduleKind


def problems(entry: Schedule, *, pipeline: int) -> tuple[Problem, ...]:
    """Every reason why there is no such schedule; () when `program` gives one."""
    if entry.kind is not ScheduleKind.TABLE:
        found = problems_of(entry.kind, pipeline=pipeline, slices=entry.slices, **_sizes(entry))
        return found + table_problems(entry, pipeline=pipeline)
    if entry.slices == 1:
        return table_problems(entry, pipeline=pipeline)
    what = f"a table does not cut microbatches into {entry.slices} slices"
    return (Problem(what=what, where="schedule.slices", fix="1 slice"), *table_problems(entry, pipeline=pipeline))


def table_problems(entry: Schedule, *, pipeline: int) -> tuple[Problem, ...]:
    """What is wrong with the table of a schedule: one that nobody would read, or that is not legal."""
    if entry.kind is not ScheduleKind.TABLE:
        what = f"a table beside kind {entry.kind.value}, which has its own"
        fix = f"kind {ScheduleKind.TABLE.value}, or no table"
        found = (Problem(what=what, where="schedule.table", fix=fix),) if entry.table else ()
        what = f"paths beside kind {entry.kind.value}, whose microbatches pass every stage in turn"
        fix = f"kind {ScheduleKind.TABLE.value}, or no paths"
        return (*found, Problem(what=what, where="schedule.paths", fix=fix)) if entry.paths else found
    if entry.paths and entry.chunks > 1:
        what = f"paths of microbatches through {entry.chunks} stages a rank"
        return (Problem(what=what, where="schedule.chunks", fix="1 chunk"),)
    try:
        written.legal(entry.table, pipeline=pipeline, paths=entry.paths, **_sizes(entry))
    except ConfigError as error:
        return error.problems
    return ()


def program(entry: Schedule, *, pipeline: int) -> Program:
    """The schedule as arrays, one row a pipeline rank. Raises ConfigError with every problem."""
    if entry.kind is ScheduleKind.TABLE:
        told = written.legal(entry.table, pipeline=pipeline, paths=entry.paths, **_sizes(entry))
        return Program.from_table(told, stages=pipeline * entry.chunks, paths=path_lines.read(entry.paths))
    return program_of(entry.kind, pipeline=pipeline, slices=entry.slices, **_sizes(entry))


def table(entry: Schedule, *, pipeline: int) -> Table:
    """The schedule as a table. Raises ConfigError with every problem."""
    return program(entry, pipeline=pipeline).table()


def placement(entry: Schedule, *, pipeline: int) -> tuple[int, ...]:
    """The rank of every stage. Raises ConfigError where the table cannot be read."""
    if entry.kind is ScheduleKind.TABLE:
        return written.placement(entry.table)
    return placement_of(entry.kind, pipeline=pipeline, chunks=entry.chunks)


def splits(entry: Schedule) -> bool:
    """Whether some backwards have two halves."""
    return entry.kind in SPLIT or written.splits(entry.table)


def of(made: Program | Table, *, chunks: int) -> Schedule:
    """The schedule of a plan that does what `made` tells, which takes the microbatches of every stage in order where
    they have no paths."""
    rows = made.table() if isinstance(made, Program) else made
    count = 1 + max(action.microbatch for row in rows for action in row)
    if isinstance(made, Program) and made.paths:
        lines, ways = written.write_numbered(rows), path_lines.write(made.paths)
        return Schedule(kind=ScheduleKind.TABLE, microbatches=count, chunks=chunks, table=lines, paths=ways)
    return Schedule(kind=ScheduleKind.TABLE, microbatches=count, chunks=chunks, table=written.write(rows))


def of_first(entry: Schedule, microbatches: int) -> Schedule:
    """The schedule of the first ones of its microbatches, or of more where it knows how."""
    lines = written.first_microbatches(entry.table, microbatches) if entry.table else ()
    return replace(entry, microbatches=microbatches, table=lines, paths=entry.paths[:microbatches])


def of_outer(entry: Schedule, microbatches: int) -> Schedule:
    """The schedule of so many of its microbatches that begins and ends as it does: of a table the first and the last
    ones. It has no paths."""
    if not entry.table:
        return of_first(entry, microbatches)
    lines = written.outer_microbatches(entry.table, microbatches, among=entry.microbatches)
    return replace(entry, microbatches=microbatches, table=lines)


def passes(entry: Schedule, stage: int) -> int:
    """How often a stage goes forward in a step: once for every microbatch that passes it, or slice of one."""
    count = entry.microbatches
    if entry.paths:
        count = sum(stage in path for path in path_lines.read(entry.paths))
    return count * entry.slices


def _sizes(entry: Schedule) -> dict[str, int]:
    return {"chunks": entry.chunks, "microbatches": entry.microbatches}
