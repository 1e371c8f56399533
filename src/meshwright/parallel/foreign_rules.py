"""What of a plan can be laid over a module that is not ours; the rest is refused by a named rule before anything is
touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from meshwright.parallel.quantized import recipe
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import Problem, name_rule
from meshwright.spec.exchange import Exchange
from meshwright.spec.plan import BlockGroup, Offload, Plan, Recompute, ScheduleKind, Sharding, TensorGrid, Training
from meshwright.spec.synchronize import Rounds

_GROUPS = "plan.stages[0].groups"
_WHOLE_PASSES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)
_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)

Found = Iterator[Problem]
Blocks = Sequence[nn.Module]


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
    found = _named(_FORM, plan)
    if found:
        return found
    blocks, found = blocks_of(module), _named(_PLAN, plan)
    of_module = (name_rule(problem, name) for name, check in _MODULE for problem in check(module, plan, blocks))
    return (*found, *of_module)


def _named(rules: Sequence[tuple[str, Callable[[Plan], Found]]], plan: Plan) -> tuple[Problem, ...]:
    return tuple(name_rule(problem, name) for name, check in rules for problem in check(plan))


def _groups_of(plan: Plan) -> list[BlockGroup]:
    return [group for stage in plan.stages for group in stage.groups]


def _whole_form(plan: Plan) -> Found:
    for name, count in Counter(axis.name for axis in plan.axes).items():
        if count > 1:
            yield Problem(what=f"axis {name.value} is named {count} times", where="plan.axes", fix="name it once")
    for axis in plan.axes:
        if axis.size < 1:
            what = f"{axis.name.value} {axis.size} is not a count of anything"
            yield Problem(what=what, where="plan.axes", fix="use 1 or more")
    if not plan.stages or not all(stage.groups for stage in plan.stages):
        yield Problem(what="a stage without blocks", where="plan.stages", fix="give every stage a group")


def _one_stage(plan: Plan) -> Found:
    if plan.pipeline > 1 or len(plan.stages) > 1:
        stages = max(plan.pipeline, len(plan.stages))
        what = f"pipeline {stages}: a module of yours is not cut into stages"
        yield Problem(what=what, where="plan.axes", fix="use pipeline 1 and shard or tensor instead")


def _whole_sequences(plan: Plan) -> Found:
    if plan.context > 1:
        what = f"context {plan.context}: attention of yours sees whole sequences"
        yield Problem(what=what, where="plan.axes", fix="use context 1 and tensor instead")
    elif plan.exchange != Exchange():
        what = f"an exchange of {plan.exchange.kind.value} and no context axis"
        yield Problem(what=what, where="plan.exchange", fix="leave it out")


def _no_expert_grid(plan: Plan) -> Found:
    if plan.experts is not None:
        what = "experts of yours have no grid of their own"
        yield Problem(what=what, where="plan.experts", fix="leave it out: the tensor axis divides experts")


def _a_line(plan: Plan) -> Found:
    if plan.tensor_grid is not TensorGrid.LINE:
        what = f"matrices of yours are not laid on a {plan.tensor_grid.value} of tensor ranks"
        yield Problem(what=what, where="plan.tensor_grid", fix="use line")


def _identity(plan: Plan) -> Found:
    if plan.is_placed:
        what = "ranks are the processes that run, in their order, and lie on no other devices"
        yield Problem(what=what, where="plan.placement", fix="leave it out, and start processes in that order")


def _whole_passes(plan: Plan) -> Found:
    schedule, where = plan.schedule, "plan.schedule"
    if schedule.kind not in _WHOLE_PASSES:
        what = f"{schedule.kind.value} orders the passes of our own layers"
        yield Problem(what=what, where=f"{where}.kind", fix=f"use {ScheduleKind.ONE_F_ONE_B.value}")
    if schedule.slices > 1:
        yield Problem(what=f"{schedule.slices} slices of a sequence", where=f"{where}.slices", fix="use 1")
    if schedule.chunks > 1:
        what = f"{schedule.chunks} chunks of a module that is not cut"
        yield Problem(what=what, where=f"{where}.chunks", fix="use 1")
    for field, words in {"table": "a table of passes", "paths": "paths over stages"}.items():
        if getattr(schedule, field) and schedule.kind in _WHOLE_PASSES:
            what = f"{words} beside {schedule.kind.value}"
            yield Problem(what=what, where=f"{where}.{field}", fix="leave it out")


def _every_step(plan: Plan) -> Found:
    sync, where = plan.gradients, "plan.gradients"
    if sync.kind.has_learners:
        what = f"replicas of a module of yours do not meet as {sync.kind.value}"
        yield Problem(what=what, where=f"{where}.kind", fix="use every_step")
    if sync.compression is not None:
        what = f"gradients of yours do not meet by {sync.compression.words}"
        yield Problem(what=what, where=f"{where}.compression", fix="leave it out")
    if sync.rounds != Rounds() and not sync.kind.has_learners:
        what = "rounds of learners, and replicas meet in every step"
        yield Problem(what=what, where=f"{where}.rounds", fix="leave it out")
    wide = plan.first_group.precision is Precision.FP64
    fits = (Precision.FP64, Precision.FP32) if wide else (Precision.FP32, Precision.BF16)
    if sync.precision not in fits:
        what = f"gradients of a module in {plan.first_group.precision.value} do not meet in {sync.precision.value}"
        names = " or ".join(precision.value for precision in fits)
        yield Problem(what=what, where=f"{where}.precision", fix=f"use {names}")


def _alike_groups(plan: Plan) -> Found:
    groups = _groups_of(plan)
    for column in ("sharding", "tensor", "precision"):
        if len({getattr(group, column) for group in groups}) > 1:
            yield Problem(what=f"groups differ in {column}", where=f"{_GROUPS}.{column}", fix="use one choice")
    tensor = groups[0].tensor
    if tensor != plan.tensor:
        what = f"{tensor} is not the size of the tensor axis, {plan.tensor}"
        yield Problem(what=what, where=f"{_GROUPS}.tensor", fix=f"use {plan.tensor}")


def _shards(plan: Plan) -> Found:
    sharding, where = plan.first_group.sharding, f"{_GROUPS}.sharding"
    if sharding is not Sharding.NONE and plan.shard == 1:
        what = f"{sharding.value} has one rank to shard over"
        yield Problem(what=what, where=where, fix="use none, or a shard axis of 2 or more")
    if plan.extents:
        what = f"blocks of yours are sharded over the shard axis, and a group says {plan.extents[0]}"
        yield Problem(what=what, where=f"{_GROUPS}.shards", fix="leave it out")
    if sharding is Sharding.NONE and plan.shard > 1:
        what = f"nothing is sharded over the shard axis of {plan.shard}"
        yield Problem(what=what, where=where, fix="use zero1, zero2 or zero3, or the replicate axis")


def _kept_as_is(plan: Plan) -> Found:
    groups = _groups_of(plan)
    if any(group.sequence_parallel for group in groups):
        what = "the stream between matrices of yours is whole"
        yield Problem(what=what, where=f"{_GROUPS}.sequence_parallel", fix="use false")
    if any(group.recompute is Recompute.SELECTIVE for group in groups):
        what = "nobody knows which part of a block of yours is its attention core"
        yield Problem(what=what, where=f"{_GROUPS}.recompute", fix="use full or none")
    if any(group.offload is not Offload.NONE for group in groups):
        yield Problem(what="nothing of yours is offloaded", where=f"{_GROUPS}.offload", fix="use none")
    if any(group.training is Training.FROZEN for group in groups):
        what = "blocks of yours train as their parameters say"
        fix = "use all, and requires_grad_(False) on what is frozen before it is laid"
        yield Problem(what=what, where=f"{_GROUPS}.training", fix=fix)
    if any(recipe(group.precision) for group in groups):
        what = f"products of yours are not rounded to {groups[0].precision.value}"
        yield Problem(what=what, where=f"{_GROUPS}.precision", fix="use bf16")
    if any(group.precision is Precision.FP16 for group in groups):
        what = "fp16 needs losses that are scaled, and yours are your own"
        yield Problem(what=what, where=f"{_GROUPS}.precision", fix="use bf16 or fp32")
    if plan.empty_rows:
        what = f"{plan.empty_rows} empty rows in a batch that you make yourself"
        yield Problem(what=what, where="plan.empty_rows", fix="use 0, and ignore the targets of rows that are too many")


def _blocks_counted(module: nn.Module, plan: Plan, blocks: Blocks) -> Found:
    """Groups follow each other over as many blocks as there are; one block stands for any number of alike ones."""
    groups, expected = _groups_of(plan), 0
    for index, group in enumerate(groups):
        if group.start != expected or group.stop <= group.start:
            what = f"blocks {group.start} to {group.stop} do not follow block {expected - 1}"
            yield Problem(what=what, where=f"{_GROUPS}[{index}]", fix=f"start at {expected}, and stop later")
            return
        expected = group.stop
    if expected not in (1, len(blocks) + 2):
        what = f"groups hold {expected} blocks and {type(module).__name__} has {len(blocks)} + 2 (what is before them, "
        fix = f"let them stop at {len(blocks) + 2}, or one group hold one block where all are alike"
        yield Problem(what=f"{what}and after)", where=_GROUPS, fix=fix)


def _blocks_there(module: nn.Module, plan: Plan, blocks: Blocks) -> Found:
    if not blocks and any(group.recompute is Recompute.FULL for group in _groups_of(plan)):
        what = "no list of alike blocks, so nothing to recompute at a time"
        yield Problem(what=what, where=type(module).__name__, fix="use recompute none")


def _laid_once(module: nn.Module, _plan: Plan, _blocks: Blocks) -> Found:
    where = type(module).__name__
    if isinstance(module, _WRAPPERS):
        yield Problem(what="wraps a module for ranks already", where=where, fix="pass the module inside")
    elif any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        what = "has distributed parameters already"
        yield Problem(what=what, where=where, fix="lay it once, before anything else does")


def _shapes_known(module: nn.Module, _plan: Plan, _blocks: Blocks) -> Found:
    """Of what is on the meta device too, and of something at all."""
    parameters = dict(module.named_parameters())
    if not parameters:
        yield Problem(what="has no parameters", where=type(module).__name__, fix="train something")
    lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
    if lazy:
        what = "has no shape before a first forward"
        yield Problem(what=what, where=lazy[0], fix="run one forward before it is laid, or name its features")
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if buffer.device.type == "meta" and name not in saved:
            what = "is a buffer without memory that no state dict brings"
            yield Problem(what=what, where=name, fix="make it on a device")


def _shared_inside(module: nn.Module, plan: Plan, blocks: Blocks) -> Found:
    """What one block holds is sharded with it, so that nothing else may hold it too."""
    if plan.first_group.sharding is Sharding.NONE:
        return
    apart = apart_from(blocks, module=module)
    holders = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    holders.append({id(parameter) for owner in apart for parameter in owner.parameters(recurse=False)})
    times = Counter(found for holder in holders for found in holder)
    tied = [name for name, parameter in module.named_parameters() if times[id(parameter)] > 1]
    if tied:
        what = "is tied to a parameter outside of its block, so no block can be sharded alone"
        yield Problem(what=what, where=tied[0], fix="untie it, or use sharding none")


def apart_from(blocks: Blocks, *, module: nn.Module) -> list[nn.Module]:
    """Modules that are not inside a block."""
    within = {id(entry) for block in blocks for entry in block.modules()}
    return [entry for entry in module.modules() if id(entry) not in within]


def _shards_have_rows(module: nn.Module, plan: Plan, _blocks: Blocks) -> Found:
    if plan.first_group.sharding is Sharding.NONE:
        return
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            fix = "give it the shape (1,), or use sharding none"
            yield Problem(what="is one number without a dim to shard", where=name, fix=fix)


def _shards_are_real(module: nn.Module, plan: Plan, _blocks: Blocks) -> Found:
    if plan.first_group.sharding is Sharding.NONE:
        return
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            fix = "keep it as pairs of real numbers and view_as_complex in forward, or use sharding none"
            yield Problem(what="is complex, and shards of a block are gathered in one real dtype", where=name, fix=fix)


def _gradients_are_dense(module: nn.Module, plan: Plan, _blocks: Blocks) -> Found:
    for name, owner in module.named_modules():
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse and plan.world_size > 1:
            what, where = "has sparse gradients, which ranks do not sum", name or type(module).__name__
            yield Problem(what=what, where=where, fix="use sparse=False")


def _hooks_stay(module: nn.Module, plan: Plan, _blocks: Blocks) -> Found:
    """One device that had the parameters keeps them, and their hooks."""
    for name, parameter in module.named_parameters():
        stays = plan.world_size == 1 and parameter.device.type != "meta"
        if not stays and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            what = "has a hook, which would see a gradient before ranks meet, or none"
            fix = "remove it, and change p.grad between laid.backward(loss) and optimizer.step()"
            yield Problem(what=what, where=name, fix=fix)


def _one_width(module: nn.Module, _plan: Plan, _blocks: Blocks) -> Found:
    """All parameters are laid in one dtype, and a forward that goes between fp64 and others would meet another."""
    wide = {name: x.dtype is torch.float64 for name, x in module.named_parameters() if x.is_floating_point()}
    if any(wide.values()) and not all(wide.values()):
        what = "is in fp64 and others are not, and all are laid in one dtype"
        where = next(name for name, is_wide in wide.items() if is_wide)
        yield Problem(what=what, where=where, fix="bring the module to one dtype, as module.float() does")


def _changed_by_backward_alone(module: nn.Module, plan: Plan, _blocks: Blocks) -> Found:
    for name, owner in module.named_modules():
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None and plan.world_size > 1:
            what = f"max_norm {owner.max_norm:g} changes rows in a forward, each rank those of its own tokens"
            yield Problem(what=what, where=name or type(module).__name__, fix="use max_norm None")


_FORM = (("module-plan-has-form", _whole_form),)
_PLAN = (
    ("module-one-stage", _one_stage),
    ("module-whole-sequences", _whole_sequences),
    ("module-no-expert-grid", _no_expert_grid),
    ("module-tensor-line", _a_line),
    ("module-not-placed", _identity),
    ("module-whole-passes", _whole_passes),
    ("module-meets-every-step", _every_step),
    ("module-groups-alike", _alike_groups),
    ("module-sharding-has-ranks", _shards),
    ("module-kept-as-is", _kept_as_is),
)
_MODULE = (
    ("module-blocks-counted", _blocks_counted),
    ("module-blocks-there", _blocks_there),
    ("module-laid-once", _laid_once),
    ("module-shapes-known", _shapes_known),
    ("module-sharded-whole", _shared_inside),
    ("module-shards-have-rows", _shards_have_rows),
    ("module-shards-real", _shards_are_real),
    ("module-gradients-dense", _gradients_are_dense),
    ("module-hooks-stay", _hooks_stay),
    ("module-one-width", _one_width),
    ("module-changed-by-backward", _changed_by_backward_alone),
)
