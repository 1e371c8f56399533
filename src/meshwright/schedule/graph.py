"""What waits for what in a schedule, dealt into waves: actions of one wave wait for none of the same wave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.schedule.paths import neighbours
from meshwright.schedule.program import BACKWARD, FORWARD, INPUT, Ids, Program

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The waves of `program`; every array but `slot` has shape (waves, ranks).

    In a wave each rank does at most one action, its next one, as soon as what it needs was done in an earlier wave.
    `action` is its index in the program, len(program) where the rank waits. `needed` is the place in the flattened
    array of the action whose output must arrive, the array's size where there is none; `link` the row of `legs` that
    it comes along, len(legs) where nothing moves. `legs` (legs, 2) are the ways between two stages, the lower one
    first. `slot` (actions,) is every action's place. `stuck` are the actions that ranks never get beyond: none when the
    schedule reaches its end.
    """

    program: Program
    action: Ids
    needed: Ids
    link: Ids
    legs: Ids
    slot: Ids
    stuck: Ids


def edges(program: Program) -> Ids:
    """The action on another stage that each action needs, len(program) where there is none.

    Needs on the same stage lie earlier in the same row, as `check` demands, and cost no waiting.
    """
    count = len(program)
    ids = np.arange(count)
    forward = program.work == FORWARD
    back = (program.work == BACKWARD) | (program.work == INPUT)
    made = np.full((2, program.stages + 2, program.microbatches, program.slices), count)
    made[0, program.stage[forward] + 1, program.microbatch[forward], program.slice[forward]] = ids[forward]
    made[1, program.stage[back] + 1, program.microbatch[back], program.slice[back]] = ids[back]
    needed = np.full(count, count)
    other = _others(program) + 1
    needed[forward] = made[0, other[forward], program.microbatch[forward], program.slice[forward]]
    needed[back] = made[1, other[back], program.microbatch[back], program.slice[back]]
    return needed


def _others(program: Program) -> Ids:
    """The stage that each action waits for, before its own forward and after it backward, shape (actions,)."""
    before, after = neighbours(program.paths, stages=program.stages, microbatches=program.microbatches)
    places = program.stage, program.microbatch
    return np.where(program.work == FORWARD, before[places], after[places])


def graph(program: Program) -> Graph:
    """The waves of `program`, whose actions are all there once and on one rank each."""
    count, ranks = len(program), program.ranks
    needs = edges(program)
    waves, stuck = _waves(program, needs)
    slot = np.zeros(count + 1, dtype=np.int64)
    slot[waves.ravel()] = np.arange(waves.size)
    slot[count] = waves.size
    legs, link = _legs(program, needs < count)
    return Graph(
        program=program,
        action=waves,
        needed=slot[np.append(needs, count)][waves],
        link=link[waves].reshape(-1, ranks),
        legs=legs,
        slot=slot[:count],
        stuck=stuck,
    )


def _legs(program: Program, moves: BoolArray) -> tuple[Ids, Ids]:
    """The legs that actions which `moves` marks wait for, and the row of each action's and of none, (actions + 1,)."""
    others, width = _others(program), program.stages + 1
    leg = np.minimum(program.stage, others) * width + np.maximum(program.stage, others)
    taken = np.zeros(width * width, dtype=np.bool_)
    taken[leg[moves]] = True
    legs, place = np.flatnonzero(taken), np.cumsum(taken) - 1
    link = np.full(len(program) + 1, len(legs))
    link[:-1][moves] = place[leg[moves]]
    return np.stack(np.divmod(legs, width), axis=1), link


def _waves(program: Program, needs: Ids) -> tuple[Ids, Ids]:
    """The action of every rank in every wave, and where ranks that do not reach their end stand."""
    count = len(program)
    following = np.arange(1, count + 2)
    following[program.starts[1:] - 1] = count
    following[count] = count
    needs = np.append(needs, count + 1)
    done = np.zeros(count + 2, dtype=np.bool_)
    done[count] = True
    position = np.where(np.diff(program.starts) > 0, program.starts[:-1], count)
    found = []
    while True:
        ready = done[needs[position]]
        if not ready.any():
            break
        wave = np.where(ready, position, count)
        done[wave] = True
        found.append(wave)
        position = np.where(ready, following[position], position)
    waves = np.stack(found) if found else np.zeros((0, program.ranks), dtype=np.int64)
    return waves, position[position < count]
