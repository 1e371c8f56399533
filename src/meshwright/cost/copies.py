"""Copies in memory: what each rank of an elastic run keeps of its neighbour, and who has what once ranks are lost.

A neighbour keeps of each rank what no other rank has (Gemini, SOSP 2023): under replicas nothing, of shards, slices
and stages all of it. Where ranks lie on several hosts the neighbour is on another host, and keeps what no other host
has: a host can be lost at once. Of learners nobody keeps anything for another: one that loses a rank is lost whole, and
what all of them go from is on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def hosts(design: Design) -> tuple[int, ...]:
    """The host of every rank of the plan, as the cluster has its nodes in order."""
    sizes = [group.devices_per_node for group in design.cluster.groups for _ in range(group.num_nodes)]
    of_device = [host for host, size in enumerate(sizes) for _ in range(size)]
    placement = design.plan.placement or range(design.plan.world_size)
    return tuple(of_device[device] for device in placement)


def copied(design: Design) -> dict[str, Holding]:
    """What a copy of a run of `design` has."""
    return learner_holdings(design) if design.plan.gradients.kind.has_learners else holdings(design)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """`keeper[r]` keeps what of rank r nobody has who is not lost with it: all of one number in `together` are."""

    keeper: tuple[int, ...]
    together: tuple[int, ...]

    @classmethod
    def of(cls, design: Design) -> Neighbours:
        """The next rank keeps where all are on one host, else a rank of another host; of the same one where more than
        half of all ranks are on that."""
        plan, on = design.plan, hosts(design)
        ranks = [plan.rank_on(device) for device in range(plan.world_size)]
        several = len(set(on)) > 1
        apart = max(map(on.count, set(on))) if several else 1
        keeper = {rank: ranks[(device + apart) % len(ranks)] for device, rank in enumerate(ranks)}
        return cls(
            keeper=tuple(keeper[rank] for rank in range(len(ranks))),
            together=on if several else tuple(range(len(ranks))),
        )

    def kept_by(self, rank: int) -> int:
        """For whom `rank` keeps."""
        return self.keeper.index(rank)


def alone(held: Mapping[str, Holding], rank: int, *, together: Sequence[int]) -> dict[str, Box]:
    """The parts of `rank` of which none that is not lost with it has the whole, by name."""
    known: dict[int, bool] = {}
    found = {}
    for name, holding in held.items():
        mine = holding.parts.get(rank)
        if mine is None:
            continue
        key = id(holding.parts)
        if key not in known:
            others = (box for other, box in holding.parts.items() if together[other] != together[rank])
            known[key] = not any(mine.meet(box) == mine for box in others)
        if known[key]:
            found[name] = mine
    return found


def left(held: Mapping[str, Holding], *, places: Mapping[int, int], neighbours: Neighbours) -> dict[str, Holding]:
    """What is left of `held` by all ranks when those in `places` are: rank r is process `places[r]` from here on.

    A process has, beside its own part, that of the lost rank that it kept.
    """
    keeper, together = neighbours.keeper, neighbours.together
    lost = [rank for rank in range(len(keeper)) if rank not in places and keeper[rank] in places]
    spared = {rank: alone(held, rank, together=together) for rank in lost}
    known: dict[tuple[object, ...], Holding] = {}
    found = {}
    for name, holding in held.items():
        gone = tuple(rank for rank in spared if name in spared[rank])
        key = id(holding.parts), gone
        if key not in known:
            parts = {places[rank]: box for rank, box in holding.parts.items() if rank in places}
            spares = {places[keeper[rank]]: spared[rank][name] for rank in gone}
            known[key] = replace(holding, parts=parts, spares=spares)
        same = known[key]
        found[name] = replace(holding, parts=same.parts, spares=same.spares)
    return found


def left_of(design: Design, *, places: Mapping[int, int]) -> dict[str, Holding]:
    """As `left`, of what a copy of a run of `design` has."""
    held = copied(design)
    if not design.plan.gradients.kind.has_learners:
        return left(held, places=places, neighbours=Neighbours.of(design))
    known: dict[int, Mapping[int, Box]] = {}
    for holding in held.values():
        parts = holding.parts
        known.setdefault(id(parts), {places[rank]: box for rank, box in parts.items() if rank in places})
    return {name: replace(holding, parts=known[id(holding.parts)]) for name, holding in held.items()}


def copied_bytes(
    table: PlanTable, owned: FloatArray, moments: FloatArray, *, job: JobSpec, met: RoundBytes | None, per_node: int
) -> FloatArray:
    """What copies take of the memory of every rank, which has `owned` parameters, `moments` bytes of an optimizer's
    state and what learners that `met` keep; all of shape (rows, ranks). It keeps as much again of its neighbour where
    no other rank has the same of the blocks that most ranks divide, or no other host where there are several, of
    `per_node` ranks. Under torchft it is one copy, while a replica that comes is given it.
    """
    if not job.elastic.on:
        return np.zeros_like(owned)
    if job.elastic.by_torchft:
        return np.asarray(owned * state_bytes(table).master[:, None] + moments)
    told = np.array([max((p.shards for p in layout.policies), default=0) for layout in table.layouts])[table.layout]
    fewest = table.data // np.maximum(told, table.shard)
    same = np.where(table.sharding == 0, table.data * table.context, fewest)
    inside = table.replicate * table.shard * table.context * table.tensor <= per_node
    sole = ((same == 1) | (inside & (table.world > per_node))) & (table.world > 1)
    sides = np.where(sole, 2.0, 1.0)[:, None]
    own = SLOTS * sides * (owned * state_bytes(table).master[:, None] + moments)
    return np.asarray(own if met is None else own + SLOTS * met.copied + met.sent)
