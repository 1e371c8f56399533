"""What ranks send and receive between their passes, in an order in which none waits for ever."""

from __future__ import annotations

from meshwright.schedule.graph import graph
from meshwright.schedule.paths import neighbours
from meshwright.schedule.program import FORWARD, Program

PATIENT_SENDS = 2  # gradients that a stage has sent and does not wait for


def with_moves(program: Program) -> tuple[tuple[str, ...], ...]:
    """One row a rank, of one stage each, in the words of torch's runtime: `0F3`, then `0SEND_F3` there and `2RECV_F3`
    where it goes, and `0REDUCE_GRAD` at the end.

    All sends and receives follow one order of the whole step: a rank receives when the other has sent, before its own
    next pass, so that of any two ranks both name their messages in the same order.
    """
    assert program.stages == program.ranks, "one stage on each rank"
    before, after = neighbours(program.paths, stages=program.stages, microbatches=program.microbatches)
    rows: list[list[str]] = [[] for _ in range(program.ranks)]
    for wave in graph(program).action.tolist():
        for index in wave:
            if index == len(program):
                continue
            stage, microbatch = int(program.stage[index]), int(program.microbatch[index])
            forward = program.work[index] == FORWARD
            word, to = ("F", int(after[stage, microbatch])) if forward else ("B", int(before[stage, microbatch]))
            rows[stage].append(f"{stage}{word}{microbatch}")
            if 0 <= to < program.stages:
                rows[stage].append(f"{stage}SEND_{word}{microbatch}")
                rows[to].append(f"{to}RECV_{word}{microbatch}")
    return tuple((*row, f"{stage}REDUCE_GRAD") for stage, row in enumerate(rows))
