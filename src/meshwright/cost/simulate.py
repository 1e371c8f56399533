"""Event simulation of any schedule table: when every action starts and ends on every pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.schedule.table import Action, Table, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one microbatch on one stage, and of its activations' way to the next stage (each way the same).

    `input_share` is the part of the backward that gives the input's gradient, for schedules that split it.
    """

    forward: float
    backward: float
    transfer: float = 0.0
    input_share: float = 0.5

    def of(self, work: Work) -> float:
        if work is Work.FORWARD:
            return self.forward
        if work is Work.BACKWARD:
            return self.backward
        return self.backward * (self.input_share if work is Work.INPUT else 1.0 - self.input_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action of pipeline rank `rank`; `waited` seconds passed between the rank's previous action and `start`."""

    rank: int
    action: Action
    start: float
    seconds: float
    waited: float


def simulate(table: Table, *, stages: Sequence[StageSeconds]) -> tuple[Event, ...]:
    """When each action runs: as soon as its rank is free and what it needs has arrived; in order of rank and row.

    A transfer takes no time of either rank: it delays the arrival. Raises AssertionError when the table can not
    reach its end (`schedule.check` tells why).
    """
    ends: dict[tuple[Work, int, int], float] = {}
    positions = [0] * len(table)
    clocks = [0.0] * len(table)
    rows: list[list[Event]] = [[] for _ in table]
    arrival = _arrivals(ends, stages)
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        row = table[rank]
        moved = False
        while positions[rank] < len(row):
            action = row[positions[rank]]
            arrived = arrival(action)
            if arrived is None:
                break
            start = max(clocks[rank], arrived)
            seconds = stages[action.stage].of(action.work)
            rows[rank].append(
                Event(rank=rank, action=action, start=start, seconds=seconds, waited=start - clocks[rank])
            )
            clocks[rank] = start + seconds
            ends[action.work, action.stage, action.microbatch] = clocks[rank]
            positions[rank] += 1
            moved = True
        if moved:
            ready = [other for other, row in enumerate(table) if other != rank and positions[other] < len(row)]
    assert all(position == len(row) for position, row in zip(positions, table, strict=True)), "the table deadlocks"
    return tuple(event for row in rows for event in row)


def makespan(events: Sequence[Event]) -> float:
    """Seconds from the first action's start to the last one's end."""
    return max((event.start + event.seconds for event in events), default=0.0)


def _arrivals(
    ends: dict[tuple[Work, int, int], float], stages: Sequence[StageSeconds]
) -> Callable[[Action], float | None]:
    """When what an action needs has arrived; None while that is not known."""
    last = len(stages) - 1

    def backward_end(stage: int, microbatch: int) -> float | None:
        whole = ends.get((Work.BACKWARD, stage, microbatch))
        return ends.get((Work.INPUT, stage, microbatch)) if whole is None else whole

    def arrival(action: Action) -> float | None:
        stage, microbatch = action.stage, action.microbatch
        if action.work is Work.FORWARD:
            if stage == 0:
                return 0.0
            end = ends.get((Work.FORWARD, stage - 1, microbatch))
            return None if end is None else end + stages[stage - 1].transfer
        if action.work is Work.WEIGHT:
            return ends.get((Work.INPUT, stage, microbatch))
        if stage == last:
            return ends.get((Work.FORWARD, stage, microbatch))
        end = backward_end(stage + 1, microbatch)
        return None if end is None else end + stages[stage].transfer

    return arrival
