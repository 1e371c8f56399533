"""parallelize: a Plan laid over a user's own module, in place. The order of what is done to it is `_lay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.agreement import Order, Usage, peers_of
from meshwright.parallel.clip import clip_gradients, gradient_norm, local_part
from meshwright.parallel.data import build_synchronizer, is_sharded, shard_module
from meshwright.parallel.divided import Divided, GroupAxis, ImaginedAxis, Indivisible, order, own
from meshwright.parallel.foreign_parts import Parts, name_reads, part_with, recompute_forward
from meshwright.parallel.foreign_rules import apart_from, blocks_of, recompute_of, unfit_for
from meshwright.parallel.mesh import Mesh, build_mesh
from meshwright.parallel.nearest import nearest_divisions
from meshwright.parallel.precision import Dtypes, dtypes
from meshwright.parallel.rules import Rules, derive, undivided
from meshwright.parallel.synchronize import ShardedGradients, Synchronizer
from meshwright.parallel.torch_compat import tree_map
from meshwright.parallel.trace import Example
from meshwright.parallel.units import units_of
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import AxisName, Plan, Recompute, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelized:
    """A module of the user's, laid as `plan` says; called as before, on this rank's sequences.

    Its parameters are distributed tensors where an axis divides them, so an optimizer of torch steps them as it is.
    By `rules` everything is whole where the tensor axis has one rank.
    """

    module: nn.Module
    plan: Plan
    mesh: Mesh
    rules: Rules
    device: torch.device
    synchronizer: Synchronizer
    usage: Usage
    order: Order | None

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Gradients of `loss`, a mean over this rank's sequences, are added. Collective.

        After the `last` of a step they are averages over the data ranks, as those of torch's own wrappers are. What
        accumulates is divided by the number of microbatches by its caller.
        """
        self.synchronizer.after_forward(last=last)
        self.usage.before_backward()
        self.synchronizer.before_backward(last=last)
        (loss / self.mesh.data_size).backward()
        if self.order is not None:
            self.order.backward_ends()
        if last:
            self.synchronizer.after_backward()
            self.usage.after_backward()

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all gradients of the whole module, the same on every rank, in fp64. Collective."""
        return gradient_norm(dict(self.module.named_parameters()), mesh=self.mesh, device=self.device)

    def clip_norm(self, max_norm: float) -> Tensor:
        """Gradients have at most the norm `max_norm`; returns the one that they had. Collective."""
        norm = self.gradient_norm()
        clip_gradients(self.module.parameters(), norm=norm, max_norm=max_norm)
        return norm

    def whole(self, name: str) -> Tensor:
        """The parameter called `name` as the user's module had it, on every rank. Collective."""
        parameter = dict(self.module.named_parameters())[name].detach()
        return self.whole_of(name, parameter)

    def whole_of(self, name: str, x: Tensor) -> Tensor:
        """x, laid as the parameter `name` is (a gradient, an optimizer's state), whole on every rank. Collective."""
        full = x.full_tensor() if isinstance(x, DTensor) else x
        division = self.rules.parts[name].division
        if division is None or len(division.pieces) == 1:
            return full
        places = torch.tensor(order(division, ranks=self.mesh.size(AxisName.TENSOR)), device=full.device)
        return full.index_select(division.dim, places.argsort())

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer whole, by the names of the user's module. Collective."""
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        names = {name: first[id(parameter)] for name, parameter in every}
        whole = {name: self.whole(name).clone() for name in first.values()}
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        saved = list(self.module.state_dict())
        return {name: whole[names[name]] if name in names else buffers[name].detach().clone() for name in saved}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Parameters and buffers are those of `state`, whole tensors of which each rank keeps its parts.

        Raises ConfigError, with nothing changed, where a tensor is missing or has another shape.
        """
        held = dict(self.module.named_parameters())
        saved = self.module.state_dict()
        buffers = {name: x for name, x in self.module.named_buffers() if name in saved}
        problems = []
        for name, kept in {**held, **buffers}.items():
            if name not in state:
                problems.append(Problem(what="is missing", where=name, fix="give a whole tensor of it"))
            elif state[name].shape != kept.shape:
                what = f"has shape {tuple(state[name].shape)} and not {tuple(kept.shape)}"
                problems.append(Problem(what=what, where=name, fix="give the whole tensor"))
        if problems:
            raise ConfigError(problems)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(state[name])
            for name, parameter in held.items():
                local_part(parameter.detach()).copy_(self._own_of(name, parameter, state[name]))

    def _own_of(self, name: str, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        part = self.rules.parts[name].division
        if part is not None:
            whole = own(
                whole,
                part,
                ImaginedAxis(size=self.mesh.size(AxisName.TENSOR), rank=self.mesh.coordinate(AxisName.TENSOR)),
            )
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
        if AxisName.SHARD.value not in names or placements[names.index(AxisName.SHARD.value)].is_replicate():
            return whole
        runs = whole.chunk(self.mesh.size(AxisName.SHARD), dim=0)
        rank = self.mesh.coordinate(AxisName.SHARD)
        return runs[rank] if rank < len(runs) else whole[:0]


def parallelize(
    module: nn.Module, plan: Plan, *, example: Example | None = None, device: torch.device | str | None = None
) -> Parallelized:
    """`module` is laid in place as `plan` says, over the processes of the default group. Collective.

    `example` is what a forward takes, as a tuple or by names, of any size: with a tensor axis the layout of its
    matrices is derived from it (see `rules`), and where blocks are sharded which of them are sharded alone (see
    `units`). Every rank starts from the weights of the first. Parameters on the meta device are given memory on
    `device` one block at a time, and are whatever lies there until `load_state_dict`.
    Of the plan `model`, `cluster`, `sequence_length`, `microbatch` and the number of microbatches are the caller's.
    Raises ConfigError with every reason why the plan cannot be laid, by the rule that it breaks, before anything is
    touched.
    """
    problems = list(unfit_for(module, plan))
    if plan.tensor > 1 and example is None:
        what = f"tensor {plan.tensor} needs an example of what the module takes"
        problems.append(Problem(what=what, where="example", fix="pass one batch, as a tuple or by names"))
    if problems:
        raise ConfigError(problems)
    kinds, rules = dtypes(plan), undivided(module)
    if plan.tensor > 1:
        assert example is not None
        rules = derive(module, example, tensor=plan.tensor)
        if not rules.divided:
            what = f"no matrix divides over {plan.tensor} tensor ranks"
            why = "; ".join(rules.describe().splitlines())
            fix = f"use tensor {' or '.join(map(str, nearest_divisions(module, example, tensor=plan.tensor)))}"
            raise ConfigError(Problem(what=what, where=type(module).__name__, why=why, fix=fix))
    sharded = plan.first_group.sharding is not Sharding.NONE
    units = units_of(module, example, blocks=blocks_of(module)) if sharded else ()
    where = torch.device(device) if device is not None else _home(module)
    mesh = build_mesh(plan, device_type=where.type)
    return _lay(module, plan, mesh=mesh, rules=rules, units=units, kinds=kinds, device=where)


def _lay(
    module: nn.Module,
    plan: Plan,
    *,
    mesh: Mesh,
    rules: Rules,
    units: Sequence[nn.Module],
    kinds: Dtypes,
    device: torch.device,
) -> Parallelized:
    if kinds.tf32:
        torch.set_float32_matmul_precision("high")  # torch keeps this for the whole process
    submesh, sharding = mesh.along(AxisName.TENSOR), plan.first_group.sharding
    axis = None if submesh is None else GroupAxis(submesh)
    sharded, blocks, name = is_sharded(sharding, mesh), blocks_of(module), type(module).__name__
    before = dict(module.named_parameters())
    parts = Parts(module, rules=rules, axis=axis, device=device, dtype=kinds.master, group=mesh.everyone)
    casts = kinds.compute if kinds.casts and not sharded else None
    for block, recompute in zip(blocks, recompute_of(plan, blocks=len(blocks)), strict=True):
        parts.take(block.modules())
        parts.read(block.modules(), dtype=casts)
        if recompute is Recompute.FULL:
            recompute_forward(block)
        if sharded and block in units:
            shard_module(block, mesh=mesh, sharding=sharding, dtypes=kinds)
    rest = apart_from(blocks, module=module)
    parts.take(rest)
    parts.read(rest, dtype=casts)
    if sharded:
        name_reads(module)
        shard_module(module, mesh=mesh, sharding=sharding, dtypes=kinds)
    part_with(before, module)
    synchronizer = build_synchronizer(
        module,
        mesh=mesh,
        shardings=dict.fromkeys((*units, module), sharding),
        dtypes=kinds,
        sharded=ShardedGradients,
    )
    peers = peers_of(mesh)
    usage = Usage(module, peers=peers)
    order = Order(module, name=name, peers=peers, usage=usage) if sharded and peers is not None else None
    if sharded:
        usage.follow_outside(ranks=mesh.data_size)
    else:
        usage.follow_autograd()
    _watch(module, axis=axis, dtype=kinds.compute if kinds.casts else None, synchronizer=synchronizer)
    if axis is not None:
        _draw_alike(axis, device)
    return Parallelized(
        module=module,
        plan=plan,
        mesh=mesh,
        rules=rules,
        device=device,
        synchronizer=synchronizer,
        usage=usage,
        order=order,
    )


def _home(module: nn.Module) -> torch.device:
    """Where the module lies, or would if it had memory."""
    lying = (parameter.device for parameter in module.parameters() if parameter.device.type != "meta")
    first = next(lying, None)
    if first is not None:
        return first
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _watch(module: nn.Module, *, axis: GroupAxis | None, dtype: torch.dtype | None, synchronizer: Synchronizer) -> None:
    """A forward of `module` takes numbers in `dtype`, returns whole tensors and leaves nothing behind."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if axis is not None:
            axis.forget()
        if not torch.is_grad_enabled():
            synchronizer.after_evaluation()
        tree_map(_check_whole, output)

    if dtype is not None:
        module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _check_whole(x: Any) -> Any:
    if isinstance(x, Divided):
        raise Indivisible("the module returns it", origins=x.origins)
    return x


def _draw_alike(axis: GroupAxis, device: torch.device) -> None:
    """Ranks of the tensor axis draw the same numbers from here on, so that what is dropped is dropped on all."""
    first = dist.get_global_rank(axis.group, 0)
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=first, group=axis.group)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        dist.broadcast(state, src=first, group=axis.group)
        torch.cuda.set_rng_state(state.cpu(), device)
