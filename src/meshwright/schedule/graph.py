"""What waits for what in a schedule, dealt into waves: actions of one wave wait for none of the same wave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, INPUT, Ids, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The waves of `program`; every array but `slot` has shape (waves, ranks).

    In a wave each rank does at most one action, its next one, as soon as what it needs was done in an earlier wave.
    `action` is its index in the program, len(program) where the rank waits. `needed` is the place in the flattened
    array of the action whose output must arrive, the array's size where there is none; `link` the stage whose output
    leaves forward or whose gradients' way it is backward, `stages` where nothing moves. `slot` (actions,) is every
    action's place. `stuck` are the actions that ranks never get beyond: none when the schedule reaches its end.
    """

    program: Program
    action: Ids
    needed: Ids
    link: Ids
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
    needed[forward] = made[0, program.stage[forward], program.microbatch[forward], program.slice[forward]]
    needed[back] = made[1, program.stage[back] + 2, program.microbatch[back], program.slice[back]]
    return needed


def graph(program: Program) -> Graph:
    """The waves of `program`, whose actions are all there once and on one rank each."""
    count, ranks = len(program), program.ranks
    needs = edges(program)
    waves, stuck = _waves(program, needs)
    slot = np.zeros(count + 1, dtype=np.int64)
    slot[waves.ravel()] = np.arange(waves.size)
    slot[count] = waves.size
    forward = program.work == FORWARD
    link = np.where(needs < count, np.where(forward, program.stage - 1, program.stage), program.stages)
    return Graph(
        program=program,
        action=waves,
        needed=slot[np.append(needs, count)][waves],
        link=np.append(link, program.stages)[waves].reshape(-1, ranks),
        slot=slot[:count],
        stuck=stuck,
    )


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
