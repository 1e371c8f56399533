"""Parameters of a user's module as parts: kept as distributed tensors, read in its forward as what this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from meshwright.parallel.divided import GroupAxis, divided, own
from meshwright.parallel.divided_functions import LOOKS, SIZES, Ruled, function_name
from meshwright.parallel.rules import Rules
from meshwright.parallel.torch_compat import meets_shards, plainly, tree_leaves
from meshwright.spec.errors import ConfigError, Problem

Reader = Callable[[Tensor], Tensor]


class Parts:
    """The parameters of a module on their way to their layout; of one with several names each name keeps it."""

    def __init__(
        self,
        module: nn.Module,
        *,
        rules: Rules,
        axis: GroupAxis | None,
        device: torch.device,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rules, self._axis, self._group = rules, axis, group
        self._device, self._dtype = device, dtype
        first: dict[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        self._first = {name: first[id(parameter)] for name, parameter in every}
        self._paths = {id(owner): path for path, owner in module.named_modules()}
        self._made: dict[str, nn.Parameter] = {}
        self._read: set[int] = set()

    def take(self, owners: Iterable[nn.Module]) -> None:
        """Parameters and buffers of `owners` lie on the device as the first rank has them, parameters divided by the
        rules. Collective."""
        for owner in owners:
            for key, parameter in list(owner.named_parameters(recurse=False)):
                name = self._name(owner, key)
                if name not in self._made:
                    self._made[name] = self._taken(name, parameter)
                setattr(owner, key, self._made[name])
            for key, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, key, self._alike(buffer))

    def read(self, owners: Iterable[nn.Module], *, dtype: torch.dtype | None) -> None:
        """In a forward `owners` see the parts that this rank holds, in `dtype` where there is one."""
        for owner in owners:
            keys = [key for key, _ in owner.named_parameters(recurse=False)]
            if id(owner) in self._read or not keys or (self._axis is None and dtype is None):
                continue
            self._read.add(id(owner))
            readers = {key: self._reader(self._name(owner, key), dtype) for key in keys}
            body = {key: property(partial(_read, key=key, reader=reader)) for key, reader in readers.items()}
            kind = type(owner)
            owner.__class__ = type(f"Parted{kind.__name__}", (kind,), body)

    def _name(self, owner: nn.Module, key: str) -> str:
        path = self._paths[id(owner)]
        return self._first[f"{path}.{key}" if path else key]

    def _taken(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter `name` laid: the same object where no axis divides it and it had memory."""
        division = self._rules.parts[name].division
        whole = self._alike(parameter.detach())
        if self._axis is None and parameter.device.type != "meta":
            parameter.data, parameter.grad = whole, None
            return parameter
        if self._axis is None:
            return nn.Parameter(whole, requires_grad=parameter.requires_grad)
        local = whole
        if division is not None:
            local = own(whole, division, self._axis).clone(memory_format=torch.contiguous_format)
        placement = Replicate() if division is None else Shard(division.dim)
        held = DTensor.from_local(local, self._axis.mesh, [placement], run_check=False)
        return nn.Parameter(held, requires_grad=parameter.requires_grad)

    def _alike(self, x: Tensor) -> Tensor:
        """x on the device, the first rank's; whatever lies there where x has no memory. Real numbers are in the dtype
        of parameters, complex ones (turns of rotary positions) as they are."""
        dtype = self._dtype if x.is_floating_point() else x.dtype
        if x.device.type == "meta":
            return torch.empty_like(x, device=self._device, dtype=dtype)
        held = x.to(self._device, dtype).contiguous()
        if self._group is not None:
            dist.broadcast(held, src=0, group=self._group)
        return held

    def _reader(self, name: str, dtype: torch.dtype | None) -> Reader:
        axis = self._axis
        division = self._rules.parts[name].division

        def read(parameter: Tensor) -> Tensor:
            local = parameter
            if isinstance(parameter, DTensor):
                if axis is None or parameter.device_mesh != axis.mesh:
                    return parameter  # sharded, and nobody's forward is at work
                local = parameter.to_local()
            if dtype is not None and local.is_floating_point():
                local = local.to(dtype)
            if division is None or axis is None:
                return local
            return divided(local, division, kind=Ruled, axis=axis, origins=frozenset({name}))

        return read


class Replaced(nn.Parameter):
    """What a parameter was before it was laid, for those who still hold it: it trains no more, so any use of it but
    looks at its shape and kind raises ConfigError."""

    laid_as: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function_name(func) in LOOKS | SIZES:
            return plainly(func, *args, **(kwargs or {}))
        leaves = tree_leaves((args, dict(kwargs or {})))
        where = next(x.laid_as for x in leaves if isinstance(x, Replaced))
        what = f"{function_name(func)} of what this parameter was before the module was laid"
        why = "an attribute that registers nothing (a tuple, a closure) or an optimizer made before holds it"
        fix = "read it as the parameter of its module in every forward, and make optimizers of laid.module.parameters()"
        raise ConfigError(Problem(what=what, where=where, why=why, fix=fix))


def part_with(before: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Parameters `before` that `module` does not hold any more are not mistaken for what it holds."""
    held = {id(parameter) for parameter in module.parameters()}
    for name, parameter in before.items():
        replaced: Any = parameter
        if id(replaced) not in held:
            replaced.__class__ = Replaced
            replaced.laid_as = name


def _read(owner: nn.Module, *, key: str, reader: Reader) -> Tensor | None:
    parameter = owner._parameters[key]
    return None if parameter is None else reader(parameter)


def recompute_forward(block: nn.Module) -> None:
    """`block` keeps its inputs alone for backward and computes the rest again (2205.05198), with the parameters that it
    was called with: `functional_call` may have lent it others."""
    kind = type(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        held = dict(self.named_parameters(remove_duplicate=False))
        return checkpoint(partial(_again, _Body(self, kind), held), *args, use_reentrant=False, **kwargs)

    block.__class__ = type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward})


def name_reads(module: nn.Module) -> None:
    """A forward of `module` that meets parameters of a block which no call of it has gathered says so in words."""
    kind = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind.forward(self, *args, **kwargs)
        except RuntimeError as error:
            if not meets_shards(error):
                raise
            what = "reads parameters of a block outside of the block's own call, which gathers them"
            fix = "pass parallelize an example that runs on the meta device, which shows such blocks, or shard nothing"
            why = str(error).splitlines()[0]
            raise ConfigError(Problem(what=what, where=f"{kind.__name__}.forward", why=why, fix=fix)) from error

    module.__class__ = type(f"Named{kind.__name__}", (kind,), {"forward": forward})


class _Body(nn.Module):
    """The forward of `block` as its class `kind` has it, without what happens around its calls."""

    def __init__(self, block: nn.Module, kind: type[nn.Module]) -> None:
        super().__init__()
        self.block, self.kind = block, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.forward(self.block, *args, **kwargs)


def _again(body: _Body, held: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """The forward of `body` with the parameters `held`."""
    now = dict(body.block.named_parameters(remove_duplicate=False))
    if all(now.get(name) is x for name, x in held.items()):
        return body(*args, **kwargs)
    lent = {f"block.{name}": x for name, x in held.items()}
    return functional_call(body, lent, args, kwargs, tie_weights=False)
