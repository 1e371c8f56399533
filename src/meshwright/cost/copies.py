"""Copies in memory: what each rank of an elastic run keeps of its neighbour, and who has what once ranks are lost.

The next rank keeps of each what no other rank has (Gemini, SOSP 2023): under replicas nothing, of shards, slices and
stages all of it. Of learners nobody keeps anything for another: one that loses a rank is lost whole, and what all of
them go from is on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.holdings import Box, Holding, holdings
from meshwright.cost.learner_holdings import learner_holdings
from meshwright.cost.round_memory import RoundBytes
from meshwright.cost.states import state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Design

SLOTS = 2  # copies that are kept, so that one is whole while the other is made


def keeper(rank: int, *, ranks: int) -> int:
    """Who keeps what `rank` alone has."""
    return (rank + 1) % ranks


def copied(design: Design) -> dict[str, Holding]:
    """What a copy of a run of `design` has."""
    return learner_holdings(design) if design.plan.gradients.kind.has_learners else holdings(design)


def alone(held: Mapping[str, Holding], rank: int) -> dict[str, Box]:
    """The parts of `rank` that no other rank has the whole of, by name."""
    known: dict[int, bool] = {}
    found = {}
    for name, holding in held.items():
        mine = holding.parts.get(rank)
        if mine is None:
            continue
        key = id(holding.parts)
        if key not in known:
            others = (box for other, box in holding.parts.items() if other != rank)
            known[key] = not any(mine.meet(box) == mine for box in others)
        if known[key]:
            found[name] = mine
    return found


def left(held: Mapping[str, Holding], *, places: Mapping[int, int], ranks: int) -> dict[str, Holding]:
    """What is left of `held` by `ranks` ranks when those in `places` are: rank r is process `places[r]` from here on.

    A process has, beside its own part, that of the lost rank that it kept.
    """
    lost = [rank for rank in range(ranks) if rank not in places]
    spared = {rank: alone(held, rank) for rank in lost if keeper(rank, ranks=ranks) in places}
    known: dict[tuple[object, ...], Holding] = {}
    found = {}
    for name, holding in held.items():
        gone = tuple(rank for rank in spared if name in spared[rank])
        key = id(holding.parts), gone
        if key not in known:
            parts = {places[rank]: box for rank, box in holding.parts.items() if rank in places}
            spares = {places[keeper(rank, ranks=ranks)]: spared[rank][name] for rank in gone}
            known[key] = replace(holding, parts=parts, spares=spares)
        same = known[key]
        found[name] = replace(holding, parts=same.parts, spares=same.spares)
    return found


def left_of(design: Design, *, places: Mapping[int, int]) -> dict[str, Holding]:
    """As `left`, of what a copy of a run of `design` has."""
    held = copied(design)
    if not design.plan.gradients.kind.has_learners:
        return left(held, places=places, ranks=design.plan.world_size)
    known: dict[int, Mapping[int, Box]] = {}
    for holding in held.values():
        parts = holding.parts
        known.setdefault(id(parts), {places[rank]: box for rank, box in parts.items() if rank in places})
    return {name: replace(holding, parts=known[id(holding.parts)]) for name, holding in held.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBytes:
    """Of the rank that has most: what a copy holds of its own and of its neighbour, which is what it is sent."""

    own: int
    kept: int

    @property
    def held(self) -> int:
        """In the host's memory, all copies together."""
        return SLOTS * (self.own + self.kept)


def copy_bytes(design: Design) -> CopyBytes:
    """What copies of `design` take on the rank where they take most."""
    held, ranks = copied(design), design.plan.world_size
    parts = [{name: one.parts[rank] for name, one in held.items() if rank in one.parts} for rank in range(ranks)]
    own = [_bytes(held, mine) for mine in parts]
    for_others = not design.plan.gradients.kind.has_learners
    sole = [_bytes(held, alone(held, rank)) if for_others else 0 for rank in range(ranks)]
    most = max(range(ranks), key=lambda rank: own[rank] + sole[rank - 1])
    return CopyBytes(own=own[most], kept=sole[most - 1])


def copied_bytes(
    table: PlanTable, owned: FloatArray, moments: FloatArray, *, job: JobSpec, met: RoundBytes | None
) -> FloatArray:
    """What copies take of the memory of every rank, which has `owned` parameters, `moments` bytes of an optimizer's
    state and what learners that `met` keep; all of shape (rows, ranks). It keeps as much again of its neighbour where
    no other rank has the same.
    """
    if not job.elastic.on:
        return np.zeros_like(owned)
    whole = (table.sharding == 0) & (table.shard * table.context > 1)
    sole = (table.replicate == 1) & ~whole & (table.world > 1)
    sides = np.where(sole, 2.0, 1.0)[:, None]
    own = SLOTS * sides * (owned * state_bytes(table).master[:, None] + moments)
    return np.asarray(own if met is None else own + SLOTS * met.copied + met.sent)


def _bytes(held: Mapping[str, Holding], boxes: Mapping[str, Box]) -> int:
    return sum(box.elements * held[name].item_bytes for name, box in boxes.items())
