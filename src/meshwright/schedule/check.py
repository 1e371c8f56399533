"""Whether a table is a legal schedule, and every reason why not."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.graph import graph
from meshwright.schedule.paths import Paths
from meshwright.schedule.program import Program
from meshwright.schedule.table import Table, disordered, incomplete, misplaced
from meshwright.spec.errors import Problem


def check(
    table: Table, *, stages: int, placement: Sequence[int] | None = None, paths: Paths = ()
) -> tuple[Problem, ...]:
    """Every reason why `table` is not a legal schedule of `stages` stages; () when it is.

    Legal means: every stage does every microbatch once forward and once backward (whole, or as two halves), each
    on the rank that holds the stage (`placement[stage]`; the loop `stage % ranks` when None), slices forward in order
    and backward in reverse, and the ranks, each doing its row in order, all reach the end. Of a microbatch with a path
    only the stages on it, in their order there. Actions out of place are reported before the deadlock they cause.
    """
    places = tuple(placement) if placement is not None else tuple(stage % len(table) for stage in range(stages))
    problems = [*misplaced(table, places), *incomplete(table, stages=stages, paths=paths)]
    problems += disordered(table, stages=stages, paths=paths)
    return tuple(problems) if problems else tuple(_deadlocked(table, stages, paths))


def _deadlocked(table: Table, stages: int, paths: Paths) -> list[Problem]:
    """Where every rank stands when none can go on; [] when all reach the end."""
    program = Program.from_table(table, stages=stages, paths=paths)
    ranks = program.rank
    problems = []
    for index in graph(program).stuck.tolist():
        rank = int(ranks[index])
        place = index - int(program.starts[rank])
        problems.append(
            Problem(
                what=f"rank {rank} waits for ever at {table[rank][place]}",
                where=f"table[{rank}][{place}]",
                why="the ranks wait for each other",
            )
        )
    return problems
