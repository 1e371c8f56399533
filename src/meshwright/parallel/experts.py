"""Expert parallel: the experts of a layer on a grid of their own over the ranks of a stage, beside dense parts that
keep their layout (MoE Parallel Folding, 2504.14960).

Experts are divided over the grid's `expert` axis, their features over `expert_tensor`, and the ranks that hold the same
ones repeat or shard them. The router works on the tokens that a rank holds; a shared branch is divided as any dense
one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.cost.traffic_parameters import EXPERT_DIMS
from meshwright.nn.decoder import DecoderLayer
from meshwright.nn.experts import Experts
from meshwright.nn.mixture import Mixing, MixtureOfExperts
from meshwright.nn.weights import Reader
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.dispatch import GatheredByExperts, SentToExperts
from meshwright.parallel.expert_mesh import EXPERT, SHARD, TENSOR, ExpertMesh, grid_sizes
from meshwright.parallel.neighbours import TensorNeighbours
from meshwright.parallel.precision import Dtypes
from meshwright.parallel.reduction import Travel
from meshwright.parallel.synchronize import Synchronizer
from meshwright.spec.errors import Problem
from meshwright.spec.model import Mixture
from meshwright.spec.plan import Design, Dispatch, Plan


def mixture_of(unit: nn.Module) -> MixtureOfExperts | None:
    """The mixture of a layer; None where it has none."""
    transform = unit.transform if isinstance(unit, DecoderLayer) else None
    return transform if isinstance(transform, MixtureOfExperts) else None


def is_expert(name: str) -> bool:
    """Whether `name` is of a parameter that a grid of experts lays out, in a model whose plan has one."""
    return ".transform.experts." in name


def expert_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Those of every mixture under `part`."""
    modules = [module for module in part.modules() if isinstance(module, Experts)]
    return [parameter for module in modules for parameter in module.parameters()]


def divide_experts(module: Experts, grid: ExpertMesh) -> None:
    """Every parameter of `module` is a distributed tensor on the grid's holders, of which this rank keeps its part."""
    if grid.holders is None:
        return
    for key, parameter in list(module.named_parameters(recurse=False)):
        local, placements = parameter.detach(), []
        for name in grid.holders.mesh_dim_names or ():
            dim = 0 if name == EXPERT else EXPERT_DIMS.get(key)
            if dim is not None:
                local = local.chunk(grid.size(name), dim=dim)[grid.places[name]]
            placements.append(Replicate() if dim is None else Shard(dim))
        held = DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format), grid.holders, placements, run_check=False
        )
        setattr(module, key, nn.Parameter(held))


def expert_reader(grid: ExpertMesh) -> Reader:
    """How experts read their distributed parameters: a bias that slices add before they are summed, a share of it."""

    def read(weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return weight
        local: Tensor = weight.to_local()
        sliced = grid.size(TENSOR) > 1
        return EvenShare.apply(local, grid.size(TENSOR)) if sliced and _is_whole(weight) else local

    return read


def _is_whole(weight: DTensor) -> bool:
    """Along the axis that divides features, whose mesh dim is the last."""
    return weight.placements[-1].is_replicate()


class EvenShare(torch.autograd.Function):
    """x / ranks, of which all ranks together add x; each is given the whole gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x / ranks

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def mixing_on(grid: ExpertMesh, plan: Plan, *, experts: int) -> Mixing | None:
    """How tokens reach a layer's `experts`, all of its ranks counted; None where each rank holds all of them."""
    assert plan.experts is not None
    if grid.holders is None:
        return None
    if plan.experts.dispatch is Dispatch.ALL_TO_ALL:
        return SentToExperts(experts=grid.experts, slices=grid.slices)
    here = experts // grid.size(EXPERT)
    first = grid.places.get(EXPERT, 0) * here
    return GatheredByExperts(experts=grid.experts, slices=grid.slices, first=first, here=here, total=experts)


def lay_mixture(mixture: MixtureOfExperts, plan: Plan, *, grid: ExpertMesh | None, tensor: DeviceMesh | None) -> None:
    """`mixture` meets its experts where the grid holds them, and one sequence weighs in it what it does in the loss.

    Without a grid all tensor ranks route the same tokens, and each counts for a share of them.
    """
    alike = plan.tensor if grid is None else 1
    mixture.each = 1.0 / (plan.batch * alike)
    if grid is None:
        return
    divide_experts(mixture.experts, grid)
    mixture.mixing = mixing_on(grid, plan, experts=mixture.spec.experts) or mixture.mixing
    if tensor is not None:
        mixture.neighbours = TensorNeighbours(tensor)


def dim_of_shards(parameter: nn.Parameter, *, shards: int) -> int:
    """The dim along which `shards` ranks share a parameter of experts: whole experts where they can, else features."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return next((dim for dim, size in enumerate(held.shape) if size % shards == 0), 0)


def expert_gradients(part: nn.Module, *, grid: ExpertMesh, dtypes: Dtypes) -> BucketedGradients:
    """How gradients of experts that no shard axis divides meet those of the ranks that hold the same ones."""
    dtype = dtypes.reduce if dtypes.reduce is not dtypes.master else None
    return BucketedGradients(expert_parameters(part), groups=grid.same, travel=Travel(dtype=dtype))


class Together:
    """Several synchronizers of one stage, told in their order."""

    def __init__(self, synchronizers: Sequence[Synchronizer]) -> None:
        self.synchronizers = tuple(synchronizers)

    def begin(self, *, step: int) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.begin(step=step)

    def after_forward(self, *, last: bool) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.after_forward(last=last)

    def before_input(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.before_input()

    def before_weights(self, *, last: bool) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.before_weights(last=last)

    def unit_done(self, unit: nn.Module) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.unit_done(unit)

    def after_weights(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.after_weights()

    def before_backward(self, *, last: bool) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.before_backward(last=last)

    def after_backward(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.after_backward()

    def after_evaluation(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.after_evaluation()


def misfit(design: Design) -> tuple[Problem, ...]:
    """Why the grid of experts of a plan cannot be laid; () when it can, or there is none."""
    plan, grid = design.plan, design.plan.experts
    if grid is None:
        return ()
    problems, ranks = [], plan.world_size // plan.pipeline
    sizes = grid_sizes(plan)
    if math.prod(sizes.values()) != ranks:
        what = f"expert {grid.expert} x tensor {grid.tensor} x {sizes[SHARD]} shards do not divide {ranks} ranks"
        problems.append(Problem(what=what, where="plan.experts", fix="use divisors of shard x tensor"))
    if plan.tensor > 1 and not plan.first_group.sequence_parallel:
        what = "tensor ranks hold the same tokens, and a grid of experts is sent different ones by each"
        problems.append(Problem(what=what, where="plan.experts", fix="use sequence parallel"))
    for layer in design.model.layers:
        part = layer.transform
        if isinstance(part, Mixture) and (part.experts % grid.expert or part.hidden % grid.tensor):
            what = f"expert {grid.expert} x tensor {grid.tensor} do not divide {part.experts} experts of {part.hidden}"
            problems.append(Problem(what=what, where="plan.experts", fix="use divisors"))
    return tuple(dict.fromkeys(problems))
