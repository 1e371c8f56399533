"""Less recompute: of layers that a plan computes again to fit, each pipeline rank need do so with only some.

A knapsack for every rank: layers are computed again, or their scores alone, in the order of bytes saved by second
lost, until the rank fits. Layers of one kind are alike, so that counting them is exact; unlike ones are taken
greedily, which loses less than one layer a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.cost.table import OFFLOADS, RECOMPUTES
from meshwright.spec.model import Layer
from meshwright.spec.plan import Design, Recompute
from meshwright.spec.report import Report

NONE, SELECTIVE, FULL = (RECOMPUTES.index(kind) for kind in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
_PAIRS = ((FULL, NONE), (FULL, SELECTIVE), (SELECTIVE, NONE))
_ROUNDS = 4  # of more layers for ranks that the straight line between the two ends left too full


def lightened(design: Design) -> Iterator[tuple[Design, Report]]:
    """Designs like this one that fit and of which fewer layers are computed again, with their reports.

    Nothing where nothing is, or where even all of it does not fit.
    """
    group = design.plan.first_group
    if group.recompute is Recompute.NONE:
        return
    ends = {kind: _uniform(design, kind) for kind in (NONE, SELECTIVE, FULL)}
    for heavy, light in _PAIRS:
        if not ends[heavy][1].fits or ends[light][1].fits:
            continue
        found = _between(ends[heavy], ends[light], heavy=heavy, light=light)
        if found is not None:
            yield found


def _uniform(design: Design, kind: int) -> tuple[Design, Report]:
    stages = tuple(
        replace(stage, groups=tuple(replace(group, recompute=RECOMPUTES[kind]) for group in stage.groups))
        for stage in design.plan.stages
    )
    made = replace(design, plan=replace(design.plan, stages=stages))
    return made, cost.predict(made)


def _between(
    heavy_end: tuple[Design, Report], light_end: tuple[Design, Report], *, heavy: int, light: int
) -> tuple[Design, Report] | None:
    """As few layers as fit under `heavy`, the others under `light`; memory is nearly a straight line between them."""
    design = heavy_end[0]
    layers = {rank: _layers(design, rank) for rank in range(design.plan.pipeline)}
    count = {}
    for full, none in zip(heavy_end[1].memory, light_end[1].memory, strict=True):
        saved, over = none.total - full.total, none.total - none.capacity
        share = 0.0 if over <= 0.0 else min(1.0, over / saved) if saved > 0.0 else 1.0
        count[full.rank] = min(len(layers[full.rank]), int(-(-share * len(layers[full.rank]) // 1)))
    for _ in range(_ROUNDS):
        chosen = {place for rank, places in layers.items() for place in places[: count[rank]]}
        made = _mixed(design, chosen, heavy=heavy, light=light)
        report = cost.predict(made)
        crowded = [memory.rank for memory in report.memory if memory.total > memory.capacity]
        if not crowded:
            return None if len(chosen) == sum(map(len, layers.values())) else (made, report)
        for rank in crowded:
            count[rank] = min(len(layers[rank]), count[rank] + 1 + count[rank] // 10)
    return None


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
