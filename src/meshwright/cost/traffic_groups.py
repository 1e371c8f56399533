"""Groups of ranks along the axes of a plan and along its grid of experts, and the report line of what they send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.plan import AxisName, Design, Plan
from meshwright.spec.report import LineName

# A reduction of this few bytes carries a loss or a norm, not gradients.
SCALAR_BYTES = 256
DATA_AXES = frozenset({AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT})


class Crowd(StrEnum):
    """Whom a group joins: ranks along axes of the plan, or ranks of the grid of experts, which tokens cross
    (`holders`) or which hold the same experts (`same`)."""

    AXES = "axes"
    HOLDERS = "holders"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`size` ranks that differ along `axes`."""

    size: int
    axes: tuple[AxisName, ...]
    crowd: Crowd = Crowd.AXES

    @property
    def words(self) -> str:
        return "+".join(sorted(self.axes))

    def line(self, operation: str, *, num_bytes: float) -> LineName:
        """The line of a collective of parameters, gradients or rows in this group."""
        gathers = operation == "all_gather"
        if self.crowd is Crowd.HOLDERS:
            return LineName.EXPERTS
        if self.crowd is Crowd.SAME and num_bytes > SCALAR_BYTES:
            return LineName.PARAMETERS if gathers else LineName.GRADIENTS
        if set(self.axes) == {AxisName.TENSOR}:
            return LineName.TENSOR
        if num_bytes > SCALAR_BYTES and DATA_AXES.issuperset(self.axes):
            return LineName.PARAMETERS if gathers else LineName.GRADIENTS
        return LineName.OTHER


def along(plan: Plan, *names: AxisName) -> Group:
    """The group along some axes at once."""
    axes = tuple(name for name in names if plan.size(name) > 1)
    return Group(size=math.prod(plan.size(name) for name in axes), axes=axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """The first rank's: those who divide a block's parameters with it, and `replicas` of its own share."""

    shards: Group
    replicas: Group


def sharers(plan: Plan, shards: int | None) -> Sharers:
    """Of a block that is sharded over so many data parallel ranks, None those of the shard axis."""
    if shards is None:
        return Sharers(shards=along(plan, AxisName.SHARD, AxisName.CONTEXT), replicas=along(plan, AxisName.REPLICATE))
    inside = _spanned(plan, range(shards))
    context = along(plan, AxisName.CONTEXT)
    replicas = range(0, plan.data, shards)
    return Sharers(
        shards=Group(size=shards * context.size, axes=(*inside, *context.axes)),
        replicas=Group(size=len(replicas), axes=_spanned(plan, replicas)),
    )


def _spanned(plan: Plan, ranks: range) -> tuple[AxisName, ...]:
    """The axes along which these data parallel ranks differ."""
    places = {AxisName.REPLICATE: {r // plan.shard for r in ranks}, AxisName.SHARD: {r % plan.shard for r in ranks}}
    return tuple(name for name, found in places.items() if len(found) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridGroups:
    """The grid of experts of one stage, from the innermost: `slices` divide each expert, `experts` hold different
    ones, `shards` share the state of the same ones, `replicas` repeat it all."""

    slices: Group
    experts: Group
    shards: Group
    replicas: Group


def grid_groups(design: Design) -> GridGroups | None:
    """The groups of the first rank of a stage; None where the plan has no grid."""
    plan, grid = design.plan, design.plan.experts
    if grid is None:
        return None
    held = grid.expert * grid.tensor
    shards = max(plan.shard * plan.context * plan.tensor // held, 1)
    replicas = plan.world_size // plan.pipeline // (held * shards)
    sizes = (grid.tensor, grid.expert, shards, replicas)
    strides = [math.prod(sizes[:place]) for place in range(len(sizes))]
    crowds = (Crowd.HOLDERS, Crowd.HOLDERS, Crowd.SAME, Crowd.SAME)
    groups = [
        Group(size=size, axes=_crossed(plan, size, stride), crowd=crowd)
        for size, stride, crowd in zip(sizes, strides, crowds, strict=True)
    ]
    return GridGroups(slices=groups[0], experts=groups[1], shards=groups[2], replicas=groups[3])


def _crossed(plan: Plan, size: int, stride: int) -> tuple[AxisName, ...]:
    """The axes along which the ranks of a stage numbered 0, stride, 2 stride ... differ."""
    inside = [axis for axis in plan.axes if axis.name is not AxisName.PIPELINE]
    found, step = [], 1
    for axis in reversed(inside):
        if len({rank * stride // step % axis.size for rank in range(size)}) > 1:
            found.append(axis.name)
        step *= axis.size
    return tuple(found)
