"""lay: a Design becomes modules on this rank. Read this file first: the wrappers of a stage, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from meshwright.cost.traffic_turns import shares_turns
from meshwright.nn import Decoder, fill
from meshwright.nn.decoder import DecoderLayer
from meshwright.nn.experts import Experts
from meshwright.nn.loss import WholeVocabulary
from meshwright.nn.weights import Reader, Weighted
from meshwright.parallel.context import divide_sequences, share_of
from meshwright.parallel.data import (
    build_synchronizer,
    experts_are_sharded,
    is_sharded,
    residuals,
    shard_experts,
    shard_module,
)
from meshwright.parallel.expert_mesh import ExpertMesh
from meshwright.parallel.experts import expert_reader, is_expert, lay_mixture, misfit, mixture_of
from meshwright.parallel.frobenius import decay_products
from meshwright.parallel.grid import RankGrid, TensorRanks, misplaced
from meshwright.parallel.layout import Laid, Parted
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.neighbours import count_together
from meshwright.parallel.offload import Copies, keep_activations_away
from meshwright.parallel.precision import Dtypes, dtypes
from meshwright.parallel.quantized import quantize_products
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.scaled import multiplier
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.synchronize import ShardedGradients, SharedGradients
from meshwright.parallel.tensor import TensorAxis, indivisible
from meshwright.parallel.torch_compat import without_memory
from meshwright.schedule import planned
from meshwright.spec.blocks import Block
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Switch
from meshwright.spec.plan import AxisName, BlockGroup, Design, Offload, Plan, Sharding, Stage, TensorGrid
from meshwright.spec.span import Recorder, Silent


def lay(
    design: Design, mesh: Mesh, *, device: torch.device | str, seed: int | None, recorder: Recorder | None = None
) -> Laid:
    """The stages of this rank, laid out as the plan says and initialised by name and seed, ready to step. Collective.

    Without a seed nothing is initialised: every value is for the caller to give.

    Raises ConfigError with every reason why the plan cannot run.
    """
    plan, device = design.plan, torch.device(device)
    problems = unfit(design)
    if problems:
        raise ConfigError(problems)
    kinds = dtypes(plan, master=design.job.master)
    if kinds.tf32:
        # torch keeps this for the whole process, and a process lays one precision.
        torch.set_float32_matmul_precision("high")
    axis, share = tensor_axis(plan, mesh), share_of(plan, mesh, device=device)
    stages = [plan.stages[index] for index in plan.stages_of(mesh.coordinate(AxisName.PIPELINE))]
    parts = [lay_stage(design, stage, mesh=mesh, axis=axis, kinds=kinds, device=device, seed=seed) for stage in stages]
    if share is not None:
        for part in parts:
            divide_sequences(part.module, share, kind=plan.exchange.kind)
            count_together(part.module, share)
    laid = Laid(
        design=design,
        mesh=mesh,
        device=device,
        dtypes=kinds,
        parts=tuple(parts),
        axis=axis,
        vocabulary=WholeVocabulary() if axis is None else axis.vocabulary(design.model.vocab),
        recorder=recorder or Silent(),
        share=share,
    )
    if design.job.compile is Switch.ON:
        laid.compile()
    return laid


def lay_stage(
    design: Design,
    stage: Stage,
    *,
    mesh: Mesh,
    axis: TensorRanks | None,
    kinds: Dtypes,
    device: torch.device,
    seed: int | None,
) -> Parted:
    """One stage. Each unit (embedding, layer, head) is filled, divided and sharded before the next one has memory."""
    grid, offload = mesh.experts, stage.groups[0].offload
    sharded = is_sharded(stage.groups[0].sharding, mesh)
    shard = partial(shard_module, mesh=mesh, dtypes=kinds, offload=offload)
    with without_memory():
        part = _made(design, stage, dtype=kinds.master)
    names = tuple(name for name, _ in part.named_parameters())
    shardings: dict[nn.Module, Sharding] = {part: stage.groups[-1].sharding}
    if axis is not None:
        axis.lay_part(part)
    for prefix, unit, block in units(part):
        unit.to_empty(device=device)
        if seed is not None:
            fill(unit, prefix=prefix, model=design.model, seed=seed)
        mixture = mixture_of(unit)
        if mixture is not None:
            lay_mixture(mixture, design.plan, grid=grid, tensor=axis.mesh if axis else None)
        if axis is not None:
            apart, holder = is_expert if grid is not None else _none, design.model.blocks[block]
            axis.divide(unit, prefix=prefix, block=holder, apart=apart, has_grid=grid is not None)
        set_readers(unit, prefix=prefix, axis=axis, kinds=kinds, grid=grid)
        decay_products(unit, design, stage=design.plan.stages.index(stage))
        if isinstance(unit, DecoderLayer) and kinds.recipe is not None:
            group = axis.group if isinstance(axis, TensorAxis) else None
            slices = group if grid is None else grid.slices
            quantize_products(unit, kinds.recipe, group=group, slices=slices, multiply=multiplier(device))
        if block in design.plan.frozen_blocks:
            unit.requires_grad_(False)
        if isinstance(unit, DecoderLayer):
            apply_recompute(unit, _group(stage, block).recompute)
        sharding = shardings[unit] = _group(stage, block).sharding
        if mixture is not None and experts_are_sharded(sharding, mesh):
            shardings[mixture.experts] = sharding
            shard_experts(mixture.experts, mesh=mesh, sharding=sharding, dtypes=kinds)
        if sharded and not (part.tied and not isinstance(unit, DecoderLayer)):
            shard(unit, sharding=sharding, shards=_group(stage, block).shards)
    if sharded:
        shard(part, sharding=shardings[part], shards=stage.groups[-1].shards)
    keep_activations_away(_kept_away(stage, part), copies=Copies(device))
    splits = planned.splits(design.plan.schedule) and design.plan.pipeline > 1
    manner = SharedGradients if shares_turns(design.plan) else ShardedGradients
    still = [unit for _, unit, block in units(part) if block < design.plan.first_trained_block]
    synchronizer = build_synchronizer(part, mesh=mesh, shardings=shardings, dtypes=kinds, sharded=manner, still=still)
    return Parted(
        module=part,
        synchronizer=synchronizer,
        partial=_partial(design, part, axis, [name for name in names if grid is None or not is_expert(name)]),
        weights=WeightGradients([unit for _, unit, _ in units(part)]) if splits else None,
        residuals=residuals(part, synchronizer),
    )


def _made(design: Design, stage: Stage, *, dtype: torch.dtype) -> Decoder:
    part = Decoder(design.model, start=stage.start, stop=stage.stop)
    return part if dtype is torch.get_default_dtype() else part.to(dtype)


def units(part: Decoder) -> list[tuple[str, nn.Module, int]]:
    """(name, module, block) of what is filled, divided and sharded on its own."""
    last = len(part.model.layers) + 1
    found: list[tuple[str, nn.Module, int]] = []
    if part.embedding is not None:
        found.append(("embedding", part.embedding, 0))
    found += [(f"layers.{index}", layer, int(index) + 1) for index, layer in part.layers.items()]
    if part.head is not None:
        found.append(("head", part.head, last))
    return found


def set_readers(
    unit: nn.Module, *, prefix: str, axis: TensorRanks | None, kinds: Dtypes, grid: ExpertMesh | None = None
) -> None:
    """Modules read the local part of a distributed parameter, in the precision that multiplies."""
    for name, module in unit.named_modules(prefix=prefix):
        if not isinstance(module, Weighted):
            continue
        local = None if axis is None else axis.reader(name)
        if grid is not None and isinstance(module, Experts):
            local = expert_reader(grid)
        module.reader = _cast_after(local, kinds.compute) if kinds.casts else local


def _cast_after(local: Reader | None, dtype: torch.dtype) -> Reader:
    if local is None:
        return lambda weight: weight.to(dtype)
    return lambda weight: local(weight).to(dtype)


def tensor_axis(plan: Plan, mesh: Mesh) -> TensorRanks | None:
    """The ranks that this one shares every layer with; None when there are none."""
    submesh = mesh.along(AxisName.TENSOR)
    if submesh is None:
        return None
    if plan.tensor_grid is not TensorGrid.LINE:
        return RankGrid(kind=plan.tensor_grid, mesh=submesh)
    return TensorAxis(mesh=submesh, sequence=plan.first_group.sequence_parallel, copied=mesh.copied)


def unfit(design: Design) -> tuple[Problem, ...]:
    """Every reason why this room cannot run the plan; () when it can."""
    plan, problems = design.plan, []
    groups = plan.groups
    if plan.learners > 1:
        what = f"its {plan.learners} learners are laid each by itself"
        problems.append(Problem(what=what, where="plan.gradients.kind", fix="lay plan.of_learner()"))
    if len({group.sharding is Sharding.NONE for group in groups}) > 1:
        problems.append(Problem(what="some groups are sharded", where="plan.stages", fix="use zero1 over 1 for none"))
    if any(shards < 1 or plan.data % shards for shards in plan.extents):
        what = f"not every number of shards divides the {plan.data} data parallel ranks"
        problems.append(Problem(what=what, where="plan.stages", fix="use divisors"))
    if len({group.sequence_parallel for group in groups}) > 1:
        problems.append(Problem(what="groups differ in sequence parallel", where="plan.stages", fix="use one choice"))
    if any(group.tensor != plan.tensor for group in groups):
        what = "a group's tensor degree is not the tensor axis"
        problems.append(Problem(what=what, where="plan.stages", fix=f"use tensor {plan.tensor}"))
    if plan.sequence_length % (2 * plan.context if plan.context > 1 else 1):
        what = f"sequence length {plan.sequence_length} does not divide by 2 x context {plan.context}"
        problems.append(Problem(what=what, where="plan.sequence_length", fix="use a multiple"))
    if groups[0].sequence_parallel and plan.sequence_length % (plan.context * plan.tensor):
        what = f"sequence length {plan.sequence_length} does not divide by context x tensor"
        what += f" {plan.context * plan.tensor}"
        problems.append(Problem(what=what, where="plan.sequence_length", fix="use a multiple"))
    if plan.tensor > 1 and plan.tensor_grid is TensorGrid.LINE:
        problems += indivisible(design.model, tensor=plan.tensor)
    problems += misplaced(design)
    problems += misfit(design)
    return tuple(problems)


def _none(_name: str) -> bool:
    return False


def _kept_away(stage: Stage, part: Decoder) -> list[DecoderLayer]:
    """Layers whose activations lie in the host's memory."""
    groups = [group for group in stage.groups if group.offload is Offload.ACTIVATIONS]
    blocks = {block for group in groups for block in range(group.start, group.stop)}
    layers = {int(index) + 1: layer for index, layer in part.layers.items() if isinstance(layer, DecoderLayer)}
    return [layer for block, layer in layers.items() if block in blocks]


def _group(stage: Stage, block: int) -> BlockGroup:
    """The group that has `block`; the table of a tied head away from its embedding is the head's."""
    return next((group for group in stage.groups if group.start <= block < group.stop), stage.groups[-1])


def _partial(
    design: Design, part: Decoder, axis: TensorRanks | None, names: Sequence[str]
) -> dict[str, tuple[dist.ProcessGroup, ...]]:
    if axis is None:
        return {}
    blocks = {prefix: design.model.blocks[block] for prefix, _, block in units(part)}
    found = {name: axis.partial_over(name, block=_block_of(name, blocks)) for name in names}
    return {name: groups for name, groups in found.items() if groups}


def _block_of(name: str, blocks: dict[str, Block]) -> Block:
    return next(block for prefix, block in blocks.items() if name.startswith(f"{prefix}."))
