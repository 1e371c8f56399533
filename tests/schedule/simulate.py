"""A minimal simulation of a table: equal stages, free transfers, backward twice as long as forward."""

from __future__ import annotations

from meshwright.schedule import Table, Work, needs

SECONDS = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.INPUT: 1.0, Work.WEIGHT: 1.0}


def idle_share(table: Table, *, stages: int, slices: int = 1) -> float:
    """Share of the step in which the mean rank is idle."""
    finished: dict[tuple[Work, int, int, int], float] = {}
    clock, position = [0.0] * len(table), [0] * len(table)
    while any(position[rank] < len(row) for rank, row in enumerate(table)):
        before = sum(position)
        for rank, row in enumerate(table):
            while position[rank] < len(row):
                action = row[position[rank]]
                wanted = needs(action, stages=stages, slices=slices)
                if any(key not in finished for key in wanted):
                    break
                start = max([clock[rank], *(finished[key] for key in wanted)])
                clock[rank] = start + SECONDS[action.work]
                work = Work.BACKWARD if action.work is Work.INPUT else action.work
                finished[work, action.stage, action.microbatch, action.slice] = clock[rank]
                position[rank] += 1
        assert sum(position) > before, "deadlock"
    busy = sum(SECONDS[action.work] for row in table for action in row) / len(table)
    return 1.0 - busy / max(clock)
