"""Less recompute: of layers that a plan computes again to fit, each pipeline rank need do so with only some.

A knapsack for every rank: layers are computed again, or their scores alone, in the order of bytes saved by second
lost, until the rank fits. Layers of one kind are alike, so that counting them is exact; unlike ones are taken
greedily, which loses less than one layer a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.table import OFFLOADS, RECOMPUTES
from meshwright.spec.model import Layer
from meshwright.spec.plan import Design, Recompute
from meshwright.spec.report import Report

NONE, SELECTIVE, FULL = (RECOMPUTES.index(kind) for kind in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
_KINDS = (NONE, SELECTIVE, FULL)
_PAIRS = ((FULL, NONE), (FULL, SELECTIVE), (SELECTIVE, NONE))
Entry = tuple[Design, Report]
_ROUNDS = 4  # of more layers for ranks that the straight line between the two ends left too full


def lightened(designs: Sequence[Design]) -> list[list[Entry]]:
    """Of each of `designs`, which are of one job and priced together: designs like it that fit and of which fewer
    layers are computed again, with their reports.

    None where nothing is computed again, or where even all of it does not fit.
    """
    found: list[list[Entry]] = [[] for _ in designs]
    again = [index for index, made in enumerate(designs) if made.plan.first_group.recompute is not Recompute.NONE]
    uniform = _priced([_uniform(designs[index], kind) for index in again for kind in _KINDS])
    ends = {
        index: dict(zip(_KINDS, uniform[3 * place : 3 * place + 3], strict=True)) for place, index in enumerate(again)
    }
    tried = [
        _Between(index=index, heavy=heavy, light=light, ends=of)
        for index, of in ends.items()
        for heavy, light in _PAIRS
        if of[heavy][1].fits and not of[light][1].fits
    ]
    for _ in range(_ROUNDS):
        made = _priced([between.design for between in tried])
        for between, entry in zip(tried, made, strict=True):
            if between.follow(entry[1]) and between.is_less:
                found[between.index].append(entry)
        tried = [between for between in tried if between.crowded]
    return found


def _priced(designs: Sequence[Design]) -> list[Entry]:
    return list(zip(designs, cost.predict_all(designs), strict=True)) if designs else []


def _uniform(design: Design, kind: int) -> Design:
    stages = tuple(
        replace(stage, groups=tuple(replace(group, recompute=RECOMPUTES[kind]) for group in stage.groups))
        for stage in design.plan.stages
    )
    return replace(design, plan=replace(design.plan, stages=stages))


class _Between:
    """As few layers as fit under `heavy`, the others under `light`; memory is nearly a straight line between the two
    `ends`."""

    def __init__(self, *, index: int, heavy: int, light: int, ends: Mapping[int, Entry]) -> None:
        self.index, self.crowded = index, True
        self._of, self._heavy, self._light = ends[heavy][0], heavy, light
        self._layers = {rank: _layers(self._of, rank) for rank in range(self._of.plan.pipeline)}
        self._count = {}
        for full, none in zip(ends[heavy][1].memory, ends[light][1].memory, strict=True):
            saved, over = none.total - full.total, none.total - none.capacity
            share = 0.0 if over <= 0.0 else min(1.0, over / saved) if saved > 0.0 else 1.0
            most = len(self._layers[full.rank])
            self._count[full.rank] = min(most, int(-(-share * most // 1)))

    @property
    def design(self) -> Design:
        chosen = {place for rank, places in self._layers.items() for place in places[: self._count[rank]]}
        return _mixed(self._of, chosen, heavy=self._heavy, light=self._light)

    @property
    def is_less(self) -> bool:
        """Whether some layer is not under `heavy`."""
        return any(self._count[rank] < len(places) for rank, places in self._layers.items())

    def follow(self, report: Report) -> bool:
        """Whether every rank of the design fits, as `report` tells; more layers for those that do not."""
        ranks = [memory.rank for memory in report.memory if memory.total > memory.capacity]
        for rank in ranks:
            self._count[rank] = min(len(self._layers[rank]), self._count[rank] + 1 + self._count[rank] // 10)
        self.crowded = bool(ranks)
        return not ranks


def _layers(design: Design, rank: int) -> list[int]:
    """The blocks of a rank that are layers, those first that keep most: largest parameters, then in model order."""
    blocks = design.model.blocks
    held = [
        place
        for stage in design.plan.stages
        if stage.rank == rank
        for place in range(stage.start, stage.stop)
        if isinstance(blocks[place], Layer)
    ]
    return sorted(held, key=lambda place: -blocks[place].parameters)


def _mixed(design: Design, chosen: set[int], *, heavy: int, light: int) -> Design:
    table = PlanTable.from_plan(design.plan)
    offload = OFFLOADS.index(design.plan.first_group.offload)
    blocks = range(len(design.model.blocks))
    policies = tuple((heavy if place in chosen else light, offload) for place in blocks)
    layout = replace(table.layouts[0], policies=policies)
    plan = replace(table, layouts=(layout,)).to_plan(
        0, model=design.plan.model, cluster=design.plan.cluster, sequence_length=design.plan.sequence_length
    )
    return replace(design, plan=replace(plan, placement=design.plan.placement))
