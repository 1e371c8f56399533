"""A checkpoint as a Hugging Face folder: shards of bounded size, written tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from meshwright.catalog.huggingface.folder import INDEX, SINGLE, Stored
from meshwright.catalog.huggingface.header import ITEM_BYTES
from meshwright.catalog.huggingface.tensors import Table
from meshwright.cost.holdings import Holding
from meshwright.parallel import stored
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.ranks import factor_names
from meshwright.train.huggingface.files import DTYPES, MappedFiles, write_file
from meshwright.train.huggingface.pieces import make_stored
from meshwright.train.huggingface.read import MODEL

Progress = Callable[[str, float, float], None]
Announced = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class CheckpointParameters:
    """Parameters of a checkpoint, read whole when asked for and kept while the next tensors need them.

    A matrix that the checkpoint has as two thin ones is their product.
    """

    source: stored.Reader
    shapes: Mapping[str, tuple[int, ...]]
    _kept: dict[str, Tensor] = field(default_factory=dict)
    _stored: Mapping[str, Holding] = field(init=False)

    def __post_init__(self) -> None:
        self._stored = stored.held_in(self.source)

    def get(self, name: str) -> Tensor:
        if name not in self._kept:
            halves = factor_names(name)
            thin = f"{MODEL}{name}" not in self._stored and f"{MODEL}{halves[0]}" in self._stored
            self._kept[name] = self._product(halves) if thin else self._read(name, self.shapes[name])
        return self._kept[name]

    def _product(self, halves: tuple[str, str]) -> Tensor:
        up, down = (self._read(half, self._stored[f"{MODEL}{half}"].shape) for half in halves)
        return (up.double() @ down.double()).float()

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, dtype=torch.float32)
        stored.read({f"{MODEL}{name}": made}, self.source, group=None)
        return made

    def keep_only(self, names: set[str]) -> None:
        for name in [name for name in self._kept if name not in names]:
            del self._kept[name]


def write_folder(
    parameters: CheckpointParameters,
    table: Table,
    path: Path,
    *,
    rest: Mapping[str, Stored],
    dtype: str,
    shard_bytes: int,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """`path` holds the tensors of `table` in files of at most `shard_bytes` each (more where one tensor has more).

    Those of `rest` are copied beside them as they are stored. A single file is model.safetensors; several
    have an index beside them. Returns the files. Raises ConfigError for a value that `dtype` cannot hold.
    """
    announced = {name: (_dtype(name, table, dtype), shape) for name, shape in table.theirs.items()}
    announced |= {name: (stored.entry.dtype, stored.entry.shape) for name, stored in rest.items()}
    copied = MappedFiles(rest)
    total = float(sum(map(_size, announced.values())))
    done = 0.0

    def make(name: str) -> Tensor:
        nonlocal done
        if name in rest:
            made = copied.tensor(name)
        else:
            parameters.keep_only({piece.ours for piece in table.of_theirs[name]})
            made = make_stored(name, dtype=DTYPES[announced[name][0]], table=table, parameter=parameters.get)
            if not made.isfinite().all():
                raise ConfigError(_not_finite(name, made, table=table, parameters=parameters))
        done += made.nbytes
        if progress is not None:
            progress("weights", done, total)
        return made

    shards = _shards(announced, limit=shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        write_file(path / name, tensors, make=make)
    if len(shards) > 1:
        owners = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": int(total)}, "weight_map": owners}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tuple(path / name for name in names)


def _not_finite(name: str, made: Tensor, *, table: Table, parameters: CheckpointParameters) -> Problem:
    """Why a stored tensor holds a number that is none: the run does, or it is beyond the type."""
    for piece in table.of_theirs[name]:
        if not parameters.get(piece.ours).isfinite().all():
            fix = "convert an earlier checkpoint, or a run that did not diverge"
            return Problem(what=f"{piece.ours} holds nan or inf", where="the run's checkpoint", fix=fix)
    most = max(float(parameters.get(piece.ours).abs().max()) for piece in table.of_theirs[name])
    what = f"{name} holds {most:.4g}, beyond {str(made.dtype).removeprefix('torch.')}"
    return Problem(what=what, where="--dtype", fix="use bf16 or fp32")


def _dtype(name: str, table: Table, dtype: str) -> str:
    return "F32" if any(piece.exact for piece in table.of_theirs[name]) else dtype


def _size(tensor: Announced) -> int:
    dtype, shape = tensor
    return math.prod(shape) * ITEM_BYTES[dtype]


def _shards(tensors: Mapping[str, Announced], *, limit: int) -> list[dict[str, Announced]]:
    """Tensors in their order, as many a shard as the limit lets in and at least one."""
    shards: list[dict[str, Announced]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = _size(tensor)
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
