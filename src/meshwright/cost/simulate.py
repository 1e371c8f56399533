"""Event simulation of any schedule: when every action starts and ends on every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.schedule.graph import Graph, graph
from meshwright.schedule.program import WORKS, Ids, Program
from meshwright.schedule.table import Action, Table, Work

_ROWS = 1024  # played at once, so that the ends of their latest actions stay in the cache


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
class StageRows:
    """StageSeconds of many rows, all of shape (stages, rows); `weight` is the part of `backward` that split schedules
    put off, and `waits` what every pass that another rank needs is longer by where ranks wait for transfers.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    transfer: FloatArray
    waits: FloatArray

    def of(self, work: Work) -> FloatArray:
        if work is Work.FORWARD:
            return self.forward + self.waits
        if work is Work.BACKWARD:
            return self.backward + self.waits
        return self.weight if work is Work.WEIGHT else self.backward - self.weight + self.waits

    @property
    def rows(self) -> int:
        return int(self.forward.shape[1])

    def take(self, rows: Ids) -> StageRows:
        """Those rows alone."""
        return StageRows(**{field.name: getattr(self, field.name)[:, rows] for field in fields(self)})

    def still(self) -> StageRows:
        """Without transfers."""
        nothing = np.zeros_like(self.transfer)
        return replace(self, transfer=nothing, waits=nothing)

    def beside(self, others: StageRows) -> StageRows:
        """These rows, then `others`."""
        names = [field.name for field in fields(self)]
        return StageRows(
            **{name: np.concatenate([getattr(self, name), getattr(others, name)], axis=1) for name in names}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action of pipeline rank `rank`; `waited` seconds passed between the rank's previous action and `start`."""

    rank: int
    action: Action
    start: float
    seconds: float
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Of every action, shape (actions,), in the order of the program: what it takes, when what it needs has arrived,
    and when it ends.
    """

    seconds: FloatArray
    arrived: FloatArray
    end: FloatArray

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return float(self.end.max(initial=0.0))


def play(waves: Graph, *, stages: Sequence[StageSeconds]) -> Played:
    """When each action ends: it starts as soon as its rank is free and what it needs has arrived.

    A transfer takes no time of either rank: it delays the arrival. A slice takes its share of its microbatch's
    seconds. Raises AssertionError when the schedule can not reach its end (`schedule.check` tells why).
    """
    assert not waves.stuck.size, "the table deadlocks"
    program = waves.program
    each = np.array([[stage.of(work) for work in WORKS] for stage in stages]) / program.slices
    seconds = each[program.stage, program.work]
    taken = np.append(seconds, 0.0)[waves.action]
    ways = over_legs(np.array([stage.transfer for stage in stages]) / program.slices, waves.legs)
    delay = np.append(ways, 0.0)[waves.link]
    num, ranks = waves.action.shape
    ends: FloatArray = np.zeros(num * ranks + 1)
    clock, arrived = np.zeros((2, ranks))
    for wave, (needed, after, lasts) in enumerate(zip(waves.needed, delay, taken, strict=True)):
        np.take(ends, needed, out=arrived, mode="clip")
        np.add(arrived, after, out=arrived)
        np.maximum(clock, arrived, out=clock)
        np.add(clock, lasts, out=clock)
        ends[wave * ranks : (wave + 1) * ranks] = clock
    came = ends[waves.needed] + delay
    return Played(seconds=seconds, arrived=came.ravel()[waves.slot], end=ends[waves.slot])


def makespans(waves: Graph, *, stages: StageRows) -> FloatArray:
    """Seconds of the whole of many rows that follow one schedule, shape (rows,).

    Takes 2 to 3 ns an action and row where rows are many, and 2 to 3 microseconds a wave where they are few.
    """
    found = np.empty(stages.rows)
    for start in range(0, stages.rows, _ROWS):
        chosen = slice(start, start + _ROWS)
        found[chosen] = _last_ends(waves, stages=stages, chosen=chosen)
    return found


def _last_ends(waves: Graph, *, stages: StageRows, chosen: slice) -> FloatArray:
    assert not waves.stuck.size, "the table deadlocks"
    program = waves.program
    zeros = np.zeros_like(stages.forward[:1, chosen])
    seconds = np.concatenate([*(stages.of(work)[:, chosen] / program.slices for work in WORKS), zeros])
    ways = np.concatenate([over_legs(stages.transfer[:, chosen] / program.slices, waves.legs), zeros])
    which = np.append(program.work * program.stages + program.stage, len(seconds) - 1)[waves.action]
    num, ranks = waves.action.shape
    ends: FloatArray = np.zeros((num * ranks + 1, zeros.shape[1]))
    clock, arrived, taken = np.zeros((3, ranks, zeros.shape[1]))
    moves = bool(ways.any())
    places = ends[:-1].reshape(num, ranks, -1)
    for needed, link, action, place in zip(waves.needed, waves.link, which, places, strict=True):
        ends.take(needed, axis=0, out=arrived, mode="clip")
        if moves:
            ways.take(link, axis=0, out=taken, mode="clip")
            np.add(arrived, taken, out=arrived)
        np.maximum(clock, arrived, out=clock)
        seconds.take(action, axis=0, out=taken, mode="clip")
        np.add(clock, taken, out=clock)
        place[:] = clock
    return np.asarray(clock.max(axis=0), dtype=np.float64)


def over_legs(transfer: FloatArray, legs: Ids) -> FloatArray:
    """Seconds of every leg, shape (legs, ...): of the slowest link between its stages, `transfer[s]` that from s on."""
    found = np.zeros((len(legs), *transfer.shape[1:]))
    for place, (low, high) in enumerate(legs.tolist()):
        found[place] = transfer[low:high].max(axis=0)
    return found


def simulate(table: Table | Program, *, stages: Sequence[StageSeconds]) -> tuple[Event, ...]:
    """When each action runs, in order of rank and row; see `play`."""
    program = table if isinstance(table, Program) else Program.from_table(table, stages=len(stages))
    played = play(graph(program), stages=stages)
    before = np.concatenate([[0.0], played.end[:-1]])
    before[program.starts[:-1]] = 0.0
    start = np.maximum(before, played.arrived)
    actions = (action for row in program.table() for action in row)
    columns = (program.rank.tolist(), start.tolist(), played.seconds.tolist(), (start - before).tolist())
    return tuple(
        Event(rank=rank, action=action, start=first, seconds=seconds, waited=waited)
        for action, rank, first, seconds, waited in zip(actions, *columns, strict=True)
    )


def makespan(events: Sequence[Event]) -> float:
    """Seconds from the first action's start to the last one's end."""
    return max((event.start + event.seconds for event in events), default=0.0)
