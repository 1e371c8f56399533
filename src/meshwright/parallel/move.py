"""A run's state by the names of the whole model, so that what one plan saved any other plan can load.

Keys are `model.<parameter>` and `optimizer.<parameter>.<field>`; values are the tensors this rank keeps, distributed
ones with their layout. No key says which stage, shard or rank a tensor was on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallel.optimizer import LocalOptimizer
from meshwright.parallel.torch_compat import held_part
from meshwright.spec.errors import ConfigError, Problem


class HasParts(Protocol):
    """Anything with local stages; a Laid is one."""

    @property
    def parts(self) -> tuple[nn.Module, ...]: ...


@runtime_checkable
class HasResiduals(Protocol):
    """What rounding left of gradients, by names that say which plan and which rank it is of."""

    def residuals(self) -> dict[str, Tensor]: ...


RESIDUAL = "optimizer.residual."


def state_dict(laid: HasParts, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """The live tensors by name: writing into them changes the model and the optimizer, packed moments excepted, of
    which these are what they stand for (see `to_load`).

    A table held twice by this rank (a tied one, at both ends) is under its one name, the first stage's copy. An
    optimizer that has made no step yet has no state and no keys.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named_tensors(laid, optimizer):
        found.setdefault(name, tensor)
    return found


def to_save(laid: HasParts, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """As `state_dict`, without what this rank holds but does not keep up to date.

    A rank whose part of a parameter is empty never steps it: its step count stands still and is not the run's.
    """
    state = state_dict(laid, optimizer)
    empty = tuple(
        f"optimizer.{name.removeprefix('model.')}."
        for name, x in state.items()
        if name.startswith("model.") and isinstance(x, DTensor) and x.to_local().numel() == 0
    )
    return {name: x for name, x in state.items() if isinstance(x, DTensor) or not name.startswith(empty)}


def to_load(laid: HasParts, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """As `state_dict` of an optimizer that has stepped: every field exists and waits to be overwritten.

    Packed moments are what is written when `loaded` is called.
    """
    if isinstance(optimizer, LocalOptimizer):
        optimizer.prepare()
        optimizer.open()
    return state_dict(laid, optimizer)


def loaded(laid: HasParts, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Call after writing into `to_load`: second copies on this rank equal the first, and moments are packed."""
    state = state_dict(laid, optimizer)
    with torch.no_grad():
        for name, tensor in named_tensors(laid, optimizer):
            if tensor is not state[name]:
                tensor.copy_(state[name])
    if isinstance(optimizer, LocalOptimizer):
        optimizer.close()


def load_state_dict(laid: HasParts, optimizer: torch.optim.Optimizer | None, values: Mapping[str, Tensor]) -> None:
    """Model and optimizer hold `values`: whole tensors, or distributed ones in the layout of this plan.

    Raises ConfigError naming every key that is missing and every shape that differs.
    """
    targets = to_load(laid, optimizer)
    problems = [
        Problem(what=f"{name} is {_told(values.get(name))}, the model has {tuple(target.shape)}", where="state")
        for name, target in targets.items()
        if name not in values or values[name].shape != target.shape
    ]
    if problems:
        raise ConfigError(problems)
    with torch.no_grad():
        for name, target in targets.items():
            value = values[name]
            if isinstance(target, DTensor):
                local = value.to_local() if isinstance(value, DTensor) else held_part(value, target)
                target.to_local().copy_(local)
            else:
                target.copy_(value)
    loaded(laid, optimizer)


def write(
    tensors: dict[str, Tensor], folder: Path, *, group: dist.ProcessGroup | None, planner: SavePlanner | None = None
) -> None:
    """`folder` holds `tensors` of all ranks of `group`, which each give what they keep; None is one process alone.

    A `planner` of its own may make what is saved while it is written: each in a file apart, since torch keeps what it
    puts into one file until that file is whole.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=planner is None)
    with _alone(group):
        save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def read(targets: dict[str, Tensor], folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """`targets` hold what `folder` has under their names, each rank its part.

    What another plan's rounding left is of no use: residuals that are not there are zero.
    """
    reader = FileSystemReader(folder)
    if any(name.startswith(RESIDUAL) for name in targets):
        there = reader.read_metadata().state_dict_metadata
        for name in [name for name in targets if name.startswith(RESIDUAL) and name not in there]:
            targets.pop(name).zero_()
    read_from(targets, reader, group=group)


def read_from(targets: dict[str, Tensor], reader: StorageReader, *, group: dist.ProcessGroup | None) -> None:
    """As `read`, of any storage that torch's checkpoints can read."""
    with _alone(group):
        load(targets, storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _alone(group: dist.ProcessGroup | None) -> Iterator[None]:
    """torch warns that a process without a group saves and loads alone, which is what was asked."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def named_tensors(laid: HasParts, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its key, in model order; a key twice where this rank holds two copies."""
    for part in laid.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, parameter in part.named_parameters():
            yield f"model.{name}", parameter.detach()
            for field, value in _state(optimizer, parameter).items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{name}.{field}", value.detach()
        for name, buffer in part.named_buffers():
            yield f"model.{name}", buffer
    if optimizer is not None and isinstance(laid, HasResiduals):
        for name, left in laid.residuals().items():
            yield f"{RESIDUAL}{name}", left


def _state(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    if isinstance(optimizer, LocalOptimizer):
        return optimizer.portable(parameter)
    return {} if optimizer is None else optimizer.state.get(parameter, {})


def _told(value: Tensor | None) -> str:
    return "missing" if value is None else f"{tuple(value.shape)}"
