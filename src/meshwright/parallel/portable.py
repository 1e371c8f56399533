"""A run's state by the names of the whole model, so that what one plan left any other plan can go on from.

Keys are `model.<parameter>` and `optimizer.<parameter>.<field>`; values are the tensors this rank keeps, distributed
ones with their layout. No key says which stage, shard or rank a tensor was on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallel.optimizer import LocalOptimizer
from meshwright.parallel.shards import held_part
from meshwright.parallel.torch_compat import with_local
from meshwright.spec.errors import ConfigError, Problem

RESIDUAL = "optimizer.residual."
Unpacked = Mapping[Tensor, Mapping[str, Tensor]]


class HasParts(Protocol):
    """Anything with local stages; a Laid is one."""

    @property
    def parts(self) -> tuple[nn.Module, ...]: ...


@runtime_checkable
class HasResiduals(Protocol):
    """What rounding left of gradients, by names that say which plan and which rank it is of."""

    def residuals(self) -> dict[str, Tensor]: ...


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """The state of this rank by name: live tensors, but copies of what moments of one byte stand for.

    A table held twice by this rank (a tied one, at both ends) is the first stage's; `copies` are the others.
    `residuals` are what rounding left of gradients, and `pack` makes the state stand for what the copies hold.
    """

    tensors: Mapping[str, Tensor]
    copies: tuple[tuple[str, Tensor], ...] = ()
    residuals: Mapping[str, Tensor] = field(default_factory=dict)
    pack: Callable[[], None] = _nothing

    def settle(self) -> None:
        """Call after writing into `tensors`: second copies equal the first, and moments are packed."""
        with torch.no_grad():
            for name, copy in self.copies:
                copy.copy_(self.tensors[name])
        self.pack()


def portable(laid: HasParts, optimizer: torch.optim.Optimizer | None = None) -> Portable:
    """The state of `laid` and `optimizer`, which has its state afterwards, as it is before the first step, if it had
    none."""
    unpacked: Unpacked = {}
    pack = _nothing
    if isinstance(optimizer, LocalOptimizer):
        optimizer.prepare()
        unpacked = optimizer.unpacked()
        pack = partial(optimizer.pack, unpacked)
    found = list(_named_tensors(laid, optimizer, unpacked))
    tensors: dict[str, Tensor] = {}
    for name, x in found:
        tensors.setdefault(name, x)
    left = laid.residuals() if optimizer is not None and isinstance(laid, HasResiduals) else {}
    return Portable(
        tensors=tensors,
        copies=tuple((name, x) for name, x in found if x is not tensors[name]),
        residuals={f"{RESIDUAL}{name}": x for name, x in left.items()},
        pack=pack,
    )


def load_state_dict(laid: HasParts, optimizer: torch.optim.Optimizer | None, values: Mapping[str, Tensor]) -> None:
    """Model and optimizer hold `values`: whole tensors, or distributed ones in the layout of this plan.

    Raises ConfigError naming every key that is missing and every shape that differs.
    """
    found = portable(laid, optimizer)
    problems = [
        Problem(what=f"{name} is {_told(values.get(name))}, the model has {tuple(target.shape)}", where="state")
        for name, target in found.tensors.items()
        if name not in values or values[name].shape != target.shape
    ]
    if problems:
        raise ConfigError(problems)
    with torch.no_grad():
        for name, target in found.tensors.items():
            value = values[name]
            if isinstance(target, DTensor):
                local = value.to_local() if isinstance(value, DTensor) else held_part(value, target)
                target.to_local().copy_(local)
            else:
                target.copy_(value)
    found.settle()


def _named_tensors(
    laid: HasParts, optimizer: torch.optim.Optimizer | None, unpacked: Unpacked
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its key, in model order; a key twice where this rank holds two copies."""
    for part in laid.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, parameter in part.named_parameters():
            yield f"model.{name}", _live(parameter)
            state = {} if optimizer is None else unpacked.get(parameter, optimizer.state.get(parameter, {}))
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{name}.{key}", _live(value)
        for name, buffer in part.named_buffers():
            yield f"model.{name}", buffer


def _live(x: Tensor) -> Tensor:
    """The memory of x, of which no gradient is asked; torch is not asked how a distributed one would be laid out."""
    if not isinstance(x, DTensor):
        return x.detach()
    with torch.no_grad():
        return with_local(x, x.to_local().detach())


def _told(value: Tensor | None) -> str:
    return "missing" if value is None else f"{tuple(value.shape)}"
