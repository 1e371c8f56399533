"""Less of what a plan does to fit: layers that it computes again, and blocks that it shards as deeply as it does, or
over as many ranks.

A knapsack for every rank: blocks are treated so, or in a lighter way, in the order of bytes saved by second lost, until
the rank fits. Blocks of one kind are alike, so that counting them is exact; unlike ones are taken greedily, which loses
less than one block a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, product
from typing import Any

import numpy as np

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.layout import Policy
from meshwright.cost.table import RECOMPUTES, SHARDINGS
from meshwright.search.constraints import limits
from meshwright.search.extent_rules import extents_laid
from meshwright.spec.model import Layer
from meshwright.spec.plan import BlockGroup, Design, Offload, Recompute, Sharding
from meshwright.spec.report import LineName, Report

Entry = tuple[Design, Report]
_ROUNDS = 4  # of more blocks for ranks that the straight line between the two ends left too full
_WORTH = 0.01  # of a step, that unlike shards must save
_ROOM, _AMPLE = 0.9, 0.8  # of a device: what is fuller fits less surely


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lever:
    """A field of groups and its values from the heaviest to the lightest, as indexes into `known`; how full a mix may
    fill a device, each share tried for itself; what it must save of a step to be `worth` it."""

    field: str
    known: Sequence[Any]
    values: tuple[int, ...]
    rooms: tuple[float, ...] = (1.0,)
    worth: float = 0.0

    def moves(self, design: Design) -> bool:
        """Whether the first blocks of `design` have a value that something is lighter than."""
        group = design.plan.first_group
        if self.field == "sharding" and group.offload is Offload.PARAMETERS:
            return False
        value = self.known.index(getattr(group, self.field))
        return value in self.values[:-1]

    def pairs(self, design: Design) -> list[tuple[int, int]]:
        """What blocks may be mixed of, the heavier one first. Shards are, of what `design` has and lighter ones; where
        there is one microbatch zero2 is no lighter than zero1."""
        if self.field == "recompute":
            return list(combinations(self.values, 2))
        own = self.known.index(design.plan.first_group.sharding)
        lighter = self.values[self.values.index(own) + 1 :]
        return [(own, value) for value in (lighter if design.plan.schedule.microbatches > 1 else lighter[-1:])]

    def may_pay(self, report: Report) -> bool:
        """Whether what a plan of `report` waits for could be less by what a mix must save."""
        return report.share(LineName.PARAMETERS) + report.share(LineName.GRADIENTS) > self.worth

    def blocks(self, design: Design, rank: int) -> list[int]:
        """The blocks of a rank that may differ, those first that have most: largest parameters, then in model order.

        Only layers are computed again; a tied head and its table are gathered as one.
        """
        blocks, every = design.model.blocks, self.field != "recompute" and not design.model.head.tied
        held = [
            place
            for stage in design.plan.stages
            if stage.rank == rank
            for place in range(stage.start, stage.stop)
            if every or isinstance(blocks[place], Layer)
        ]
        return sorted(held, key=lambda place: -blocks[place].parameters)

    def weight(self, design: Design, block: int) -> float:
        """What of memory one block stands for."""
        return float(design.model.blocks[block].parameters) if self.field != "recompute" else 1.0

    def given(self, group: BlockGroup, value: int) -> BlockGroup:
        changed: dict[str, Any] = {self.field: self.known[value]}
        return replace(group, **changed)


class _Extents(_Lever):
    """The number of ranks that divide a group: the plan's own, 0, or lighter those of the shard axis in one node; its
    own alone where the job fixes how many those are."""

    def moves(self, design: Design) -> bool:
        near = _in_node(design)
        is_open = "shard" not in limits(design.job.constraints).fixed
        sharded = design.plan.first_group.sharding is not Sharding.NONE and 1 < near < design.plan.shard
        return is_open and sharded and extents_laid(_uniform(design, self, near)) is None

    def pairs(self, design: Design) -> list[tuple[int, int]]:
        return [(0, _in_node(design))]

    def given(self, group: BlockGroup, value: int) -> BlockGroup:
        return replace(group, shards=value or None)


def _in_node(design: Design) -> int:
    """Of the ranks of the shard axis those that lie in one node, the fewest where nodes differ."""
    plan, room = design.plan, min(group.devices_per_node for group in design.cluster.groups)
    return math.gcd(plan.shard, max(room // (plan.context * plan.tensor), 1))


_AGAIN = _Lever(
    field="recompute",
    known=RECOMPUTES,
    values=tuple(RECOMPUTES.index(kind) for kind in (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE)),
    rooms=(1.0, _ROOM, _AMPLE),
)
_SHARDS = _Lever(
    field="sharding",
    known=SHARDINGS,
    values=tuple(SHARDINGS.index(kind) for kind in (Sharding.PARAMETERS, Sharding.GRADIENTS, Sharding.OPTIMIZER)),
    rooms=(1.0, _ROOM),
    worth=_WORTH,
)


_NEAR = _Extents(field="shards", known=(), values=(), rooms=(1.0, _ROOM), worth=_WORTH)
_LEVERS = (_AGAIN, _SHARDS, _NEAR)


def lightened(designs: Sequence[Design]) -> list[list[Entry]]:
    """Of each of `designs`, which are of one job and priced together: designs like it that fit and of which fewer
    layers are computed again, or fewer blocks are sharded as deeply or as widely, with their reports.

    None where nothing could be lighter, or where even all of it does not fit.
    """
    found: list[list[Entry]] = [[] for _ in designs]
    moved = [(index, lever) for index, made in enumerate(designs) for lever in _LEVERS if lever.moves(made)]
    deep = [index for index, lever in moved if lever.worth]
    own = dict(zip(deep, _priced([designs[index] for index in deep]), strict=True))
    moved = [(index, lever) for index, lever in moved if not lever.worth or lever.may_pay(own[index][1])]
    pairs = [lever.pairs(designs[index]) for index, lever in moved]
    asked = [
        (index, lever, value)
        for (index, lever), both in zip(moved, pairs, strict=True)
        for value in dict.fromkeys(value for pair in both for value in pair)
    ]
    priced = _priced([_uniform(designs[index], lever, value) for index, lever, value in asked])
    uniform = {(index, lever.field, value): entry for (index, lever, value), entry in zip(asked, priced, strict=True)}
    tried = []
    for (index, lever), both in zip(moved, pairs, strict=True):
        ends = {value: uniform[index, lever.field, value] for pair in both for value in pair}
        for (heavy, light), room in product(both, lever.rooms):
            if _fits(ends[heavy][1], room=room) and not _fits(ends[light][1], room=room):
                tried.append(_Between(index=index, lever=lever, heavy=heavy, light=light, room=room, ends=ends))
    for _ in range(_ROUNDS):
        made = _priced([between.design for between in tried])
        for between, entry in zip(tried, made, strict=True):
            if between.follow(entry[1]) and between.is_less and between.pays(entry[1]):
                found[between.index].append(entry)
        tried = [between for between in tried if between.crowded]
    return found


def _priced(designs: Sequence[Design]) -> list[Entry]:
    return list(zip(designs, cost.predict_all(designs), strict=True)) if designs else []


def _fits(report: Report, *, room: float) -> bool:
    """Whether a plan fits and fills no more than `room` of any device."""
    return report.fits and all(memory.total <= room * memory.capacity for memory in report.memory)


def _uniform(design: Design, lever: _Lever, value: int) -> Design:
    stages = tuple(
        replace(stage, groups=tuple(lever.given(group, value) for group in stage.groups))
        for stage in design.plan.stages
    )
    return replace(design, plan=replace(design.plan, stages=stages))


class _Between:
    """As few blocks as fit into `room` of every device under `heavy`, the others under `light`; memory is nearly a
    straight line between the two `ends`."""

    def __init__(
        self, *, index: int, lever: _Lever, heavy: int, light: int, room: float, ends: Mapping[int, Entry]
    ) -> None:
        self.index, self.crowded, self._room = index, True, room
        self._of, self._lever, self._heavy, self._light = ends[heavy][0], lever, heavy, light
        self._before = ends[heavy][1]
        self._blocks = {rank: lever.blocks(self._of, rank) for rank in range(self._of.plan.pipeline)}
        self._count = {}
        for full, none in zip(ends[heavy][1].memory, ends[light][1].memory, strict=True):
            saved, over = none.total - full.total, none.total - room * none.capacity
            share = 0.0 if over <= 0.0 else min(1.0, over / saved) if saved > 0.0 else 1.0
            weights = [lever.weight(self._of, block) for block in self._blocks[full.rank]]
            upto = [0.0, *accumulate(weights)]
            self._count[full.rank] = min(len(weights), int(np.searchsorted(upto, share * upto[-1])))

    @property
    def design(self) -> Design:
        chosen = {block for rank, blocks in self._blocks.items() for block in blocks[: self._count[rank]]}
        return _mixed(self._of, self._lever, chosen, heavy=self._heavy, light=self._light)

    @property
    def is_less(self) -> bool:
        """Whether some block is not under `heavy`."""
        return any(self._count[rank] < len(blocks) for rank, blocks in self._blocks.items())

    def pays(self, report: Report) -> bool:
        """Whether it saves as much as the lever asks for."""
        return report.step_seconds <= (1.0 - self._lever.worth) * self._before.step_seconds

    def follow(self, report: Report) -> bool:
        """Whether every rank of the design fits so, as `report` tells; more blocks for those that do not."""
        ranks = [memory.rank for memory in report.memory if memory.total > self._room * memory.capacity]
        for rank in ranks:
            self._count[rank] = min(len(self._blocks[rank]), self._count[rank] + 1 + self._count[rank] // 10)
        self.crowded = bool(ranks)
        return not ranks


def _mixed(design: Design, lever: _Lever, chosen: set[int], *, heavy: int, light: int) -> Design:
    """`chosen` blocks under `heavy`, and all others that may differ under `light`."""
    table, usual = PlanTable.from_plan(design.plan), Policy.of(design.plan.first_group)
    own = {block for rank in range(design.plan.pipeline) for block in lever.blocks(design, rank)}
    before = table.layouts[0].policies or (usual,) * len(design.model.blocks)
    policies = tuple(
        policy._replace(**{lever.field: heavy if place in chosen or place not in own else light})
        for place, policy in enumerate(before)
    )
    layout = replace(table.layouts[0], policies=policies)
    plan = replace(table, layouts=(layout,)).to_plan(
        0, model=design.plan.model, cluster=design.plan.cluster, sequence_length=design.plan.sequence_length
    )
    return replace(design, plan=replace(plan, placement=design.plan.placement))
