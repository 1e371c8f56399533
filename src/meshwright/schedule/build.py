"""From the name of a schedule to its actions, its placement of stages and its bubble."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.schedule.breadth_first import breadth_first
from meshwright.schedule.dual_pipe_v import dual_pipe_v
from meshwright.schedule.gpipe import gpipe
from meshwright.schedule.interleaved import interleaved
from meshwright.schedule.one_f_one_b import one_f_one_b
from meshwright.schedule.program import Ids, Program
from meshwright.schedule.sequence import sequence
from meshwright.schedule.table import Table
from meshwright.schedule.zero_bubble import zero_bubble
from meshwright.schedule.zero_bubble_v import zero_bubble_v
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import ScheduleKind as Kind

NAMED = tuple(kind for kind in Kind if kind is not Kind.TABLE)  # those whose name says what ranks do
LOOPS = frozenset({Kind.INTERLEAVED, Kind.BREADTH_FIRST})
V_SHAPES = frozenset({Kind.ZERO_BUBBLE_V, Kind.DUAL_PIPE_V})
CHUNKED = LOOPS | V_SHAPES | {Kind.TABLE}
SLICED = frozenset({Kind.GPIPE, Kind.SEQUENCE_1F1B})
SPLIT = frozenset({Kind.ZERO_BUBBLE_H1, Kind.ZERO_BUBBLE_H2, *V_SHAPES})


def problems(kind: Kind, *, pipeline: int, chunks: int, microbatches: int, slices: int = 1) -> tuple[Problem, ...]:
    """Every reason why there is no such schedule; () when `build` gives one."""
    sizes = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches, "slices": slices}
    found = [
        Problem(what=f"{value} is not a number of {name}", where=f"schedule.{name}", fix="at least 1")
        for name, value in sizes.items()
        if value < 1
    ]
    if kind not in LOOPS | V_SHAPES and chunks > 1:
        what = f"{kind.value} runs one stage on each rank, not {chunks}"
        fix = f"1 chunk, or kind {Kind.INTERLEAVED.value} or {Kind.BREADTH_FIRST.value}"
        found.append(Problem(what=what, where="schedule.chunks", fix=fix))
    if kind in V_SHAPES and chunks != 2:
        what = f"{kind.value} runs two stages on each rank, not {chunks}"
        found.append(Problem(what=what, where="schedule.chunks", fix="2 chunks"))
    if kind not in SLICED and slices > 1:
        what = f"{kind.value} does not cut microbatches into {slices} slices"
        found.append(Problem(what=what, where="schedule.slices", fix=f"1 slice, or kind {' or '.join(sorted(SLICED))}"))
    if kind is Kind.INTERLEAVED and not found and microbatches % pipeline:
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
    if kind is Kind.DUAL_PIPE_V and not found and microbatches < 2 * pipeline:
        found.append(
            Problem(
                what=f"{microbatches} microbatches are fewer than two for each of {pipeline} pipeline ranks",
                where="schedule.microbatches",
                why="its pairs are of a microbatch that goes down the ranks and one that comes up",
                fix=f"{2 * pipeline} microbatches or more, or kind {Kind.ZERO_BUBBLE_V.value}",
            )
        )
    return tuple(found)


def program(kind: Kind, *, pipeline: int, chunks: int, microbatches: int, slices: int = 1) -> Program:
    """The schedule as arrays, one row a pipeline rank. Raises ConfigError with every problem."""
    found = problems(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices)
    if found:
        raise ConfigError(found)
    row = _row(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices)
    rows = [row(rank) for rank in range(pipeline)]
    return Program.of(rows, stages=pipeline * chunks, microbatches=microbatches, slices=slices)


def build(kind: Kind, *, pipeline: int, chunks: int, microbatches: int, slices: int = 1) -> Table:
    """The table of `kind`: legal by `check`, one row a pipeline rank. Raises ConfigError with every problem."""
    return program(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices).table()


def _row(kind: Kind, *, pipeline: int, chunks: int, microbatches: int, slices: int) -> Callable[[int], Ids]:
    """What gives the row of a rank."""
    both = {"pipeline": pipeline, "microbatches": microbatches}
    makers: dict[Kind, Callable[[int], Ids]] = {
        Kind.GPIPE: partial(gpipe, microbatches=microbatches, slices=slices),
        Kind.ONE_F_ONE_B: partial(one_f_one_b, **both),
        Kind.INTERLEAVED: partial(interleaved, chunks=chunks, **both),
        Kind.BREADTH_FIRST: partial(breadth_first, chunks=chunks, **both),
        Kind.ZERO_BUBBLE_H1: partial(zero_bubble, depth=1, **both),
        Kind.ZERO_BUBBLE_H2: partial(zero_bubble, depth=2, **both),
        Kind.ZERO_BUBBLE_V: partial(zero_bubble_v, **both),
        Kind.DUAL_PIPE_V: partial(dual_pipe_v, **both),
        Kind.SEQUENCE_1F1B: partial(sequence, slices=slices, **both),
    }
    return makers[kind]


def stage_rank(kind: Kind, stage: int, *, pipeline: int, chunks: int) -> int:
    """The pipeline rank that holds `stage`: down the ranks and up again for V shapes, in a loop for the others.

    The last rank of a V holds its two middle stages, the first one both ends of the model.
    """
    assert 0 <= stage < pipeline * chunks, f"{kind.value} of {pipeline} x {chunks} has no stage {stage}"
    if kind in V_SHAPES and stage >= pipeline:
        return 2 * pipeline - 1 - stage
    return stage % pipeline


def placement(kind: Kind, *, pipeline: int, chunks: int) -> tuple[int, ...]:
    """The rank of every stage."""
    return tuple(stage_rank(kind, stage, pipeline=pipeline, chunks=chunks) for stage in range(pipeline * chunks))
