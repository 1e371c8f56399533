"""What of a plan can be laid over a module that is not ours; the rest is refused by name before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.quantized import recipe
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import Problem
from meshwright.spec.plan import BlockGroup, Offload, Plan, Recompute, ScheduleKind, Sharding

_GROUP = "plan.stages[0].groups"


def blocks_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The repeated blocks of `module`, in order: members of its outermost lists of modules of one class."""
    members = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(entry) for entry in members}) == 1
    if is_list and all(any(True for _ in entry.children()) for entry in members):
        return tuple(dict.fromkeys(members))
    return tuple(dict.fromkeys(block for child in members for block in blocks_of(child)))


def recompute_of(plan: Plan, *, blocks: int) -> tuple[Recompute, ...]:
    """What each of `blocks` repeated blocks recomputes. A plan counts a block before them and one after."""
    groups = plan.stages[0].groups
    if len({group.recompute for group in groups}) == 1:
        return (groups[0].recompute,) * blocks
    kinds = [group.recompute for group in groups for _ in range(group.start, group.stop)]
    return tuple(kinds[1:-1])


def unfit_for(module: nn.Module, plan: Plan) -> tuple[Problem, ...]:
    """Every reason why `plan` cannot be laid over a user's `module`, the division of its matrices aside."""
    groups, blocks = [group for stage in plan.stages for group in stage.groups], blocks_of(module)
    return (*_axes(plan), *_schedule(plan), *_groups(groups), *_blocks(plan, module, blocks))


def _axes(plan: Plan) -> list[Problem]:
    found = []
    if plan.pipeline > 1 or len(plan.stages) > 1:
        what = f"pipeline {plan.pipeline}: a module of yours is not cut into stages"
        found.append(Problem(what=what, where="plan.axes", fix="use pipeline 1 and shard or tensor instead"))
    if plan.context > 1:
        what = f"context {plan.context}: attention of yours sees whole sequences"
        found.append(Problem(what=what, where="plan.axes", fix="use context 1 and tensor instead"))
    if plan.experts is not None:
        what = "experts of yours have no grid of their own"
        found.append(Problem(what=what, where="plan.experts", fix="leave it out: the tensor axis divides experts"))
    return found


def _schedule(plan: Plan) -> list[Problem]:
    found = []
    schedule, where = plan.schedule, "plan.schedule"
    if schedule.slices > 1:
        found.append(Problem(what=f"{schedule.slices} slices of a sequence", where=f"{where}.slices", fix="use 1"))
    if schedule.kind is ScheduleKind.BREADTH_FIRST:
        what = "breadth-first order is of our own layers"
        found.append(Problem(what=what, where=f"{where}.kind", fix=f"use {ScheduleKind.ONE_F_ONE_B.value}"))
    if plan.gradients.precision is Precision.FP8:
        what = "gradients of yours do not meet in fp8"
        found.append(Problem(what=what, where="plan.gradients.precision", fix="use bf16 or fp32"))
    if plan.gradients.compression is not None:
        what = f"gradients of yours do not meet by {plan.gradients.compression.words}"
        found.append(Problem(what=what, where="plan.gradients.compression", fix="leave it out"))
    return found


def _groups(groups: Sequence[BlockGroup]) -> list[Problem]:
    found = [
        Problem(what=f"groups differ in {column}", where=_GROUP, fix="use one choice")
        for column in ("sharding", "tensor", "precision")
        if len({getattr(group, column) for group in groups}) > 1
    ]
    if any(group.sequence_parallel for group in groups):
        what = "the stream between matrices of yours is whole"
        found.append(Problem(what=what, where=f"{_GROUP}.sequence_parallel", fix="use false"))
    if any(group.recompute is Recompute.SELECTIVE for group in groups):
        what = "nobody knows which part of a block of yours is its attention core"
        found.append(Problem(what=what, where=f"{_GROUP}.recompute", fix="use full or none"))
    if any(group.offload is not Offload.NONE for group in groups):
        found.append(Problem(what="nothing of yours is offloaded", where=f"{_GROUP}.offload", fix="use none"))
    if any(recipe(group.precision) for group in groups):
        what = f"products of yours are not rounded to {groups[0].precision.value}"
        found.append(Problem(what=what, where=f"{_GROUP}.precision", fix="use bf16"))
    return found


def _blocks(plan: Plan, module: nn.Module, blocks: Sequence[nn.Module]) -> list[Problem]:
    found, groups = [], plan.stages[0].groups
    kinds = {group.recompute for group in groups}
    if Recompute.FULL in kinds and not blocks:
        what = "no list of alike blocks, so nothing to recompute at a time"
        found.append(Problem(what=what, where=type(module).__name__, fix="use recompute none"))
    if len(kinds) > 1 and groups[-1].stop != len(blocks) + 2:
        what = f"groups recompute differently over {groups[-1].stop} blocks and the module has {len(blocks)} + 2"
        found.append(Problem(what=what, where=_GROUP, fix="use one choice for all"))
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        what = "has distributed parameters already"
        found.append(Problem(what=what, where=type(module).__name__, fix="lay it once, before anything else does"))
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = {
        id(parameter) for owner in apart_from(blocks, module=module) for parameter in owner.parameters(recurse=False)
    }
    if groups[0].sharding is not Sharding.NONE and inside & outside:
        names = [name for name, parameter in module.named_parameters() if id(parameter) in inside & outside]
        what = "is tied to a parameter outside of its block, so no block can be sharded alone"
        found.append(Problem(what=what, where=names[0], fix="untie it, or use sharding none"))
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if buffer.device.type == "meta" and name not in saved:
            what = "is a buffer without memory that no state dict brings"
            found.append(Problem(what=what, where=name, fix="make it on a device"))
    return found


def apart_from(blocks: Sequence[nn.Module], *, module: nn.Module) -> list[nn.Module]:
    """Modules that are not inside a block."""
    within = {id(entry) for block in blocks for entry in block.modules()}
    return [entry for entry in module.modules() if id(entry) not in within]
