"""RankCount: what one step does on one pipeline rank; and which ranks are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.spec.codec import canonical
from meshwright.spec.exchange import TokenLayout
from meshwright.spec.plan import AxisName, Design, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCount:
    """What one step does on pipeline rank `rank`, at the first of its data and tensor ranks and that of its context
    ranks with most scores: bytes by part at the peak, FLOPs by line, calls and bytes of collectives by
    `line|operation|axes`; `host` are the most bytes of what is offloaded. `probed` from few layers and microbatches,
    else all were traced."""

    rank: int
    memory: Mapping[str, float]
    flops: Mapping[str, float]
    calls: Mapping[str, float]
    bytes: Mapping[str, float]
    host: float = 0.0
    probed: bool = False


def heaviest(plan: Plan, pipeline_rank: int) -> int:
    """The rank of that pipeline rank with most work: the first on every other axis, but the last of context ranks that
    hold a sequence one behind the other, whose queries see all keys before them."""
    names = [axis.name for axis in plan.axes]
    first = plan.first_rank_of(pipeline_rank)
    if plan.exchange.layout is not TokenLayout.CONTIGUOUS or AxisName.CONTEXT not in names:
        return first
    inside = plan.axes[names.index(AxisName.CONTEXT) + 1 :]
    return first + (plan.context - 1) * math.prod(axis.size for axis in inside)


def content(design: Design, rank: int) -> str:
    """What pipeline rank `rank` holds, whatever its number, and of which fragments: equal texts, equal passes."""
    plan, last = design.plan, len(design.plan.stages) - 1
    held = []
    for index in plan.stages_of(rank):
        stage = plan.stages[index]
        groups = [replace(group, start=0, stop=group.stop - group.start) for group in stage.groups]
        layers = design.model.layers[max(stage.start, 1) - 1 : max(stage.stop - 1, 0)]
        held.append([index == 0, index == last, groups, layers])
    return canonical([held, rank] if plan.sends_fragments else held)
