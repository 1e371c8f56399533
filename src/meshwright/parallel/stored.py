"""State in files, as torch's distributed checkpoints keep it: written, read, and what of every tensor is there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

from meshwright.cost.holdings import Box, Holding


def write(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    group: dist.ProcessGroup | None,
    planner: SavePlanner | None = None,
) -> None:
    """`folder` holds `tensors` of all ranks of `group`, which each give what they keep; None is one process alone.

    A `planner` of its own may make what is saved while it is written: each in a file apart, since torch keeps what it
    puts into one file until that file is whole.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=planner is None)
    with _alone(group):
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def read(targets: Mapping[str, Tensor], source: Path | StorageReader, *, group: dist.ProcessGroup | None) -> None:
    """`targets` hold what `source` has under their names, each rank its part."""
    with _alone(group):
        load(dict(targets), storage_reader=_reader(source), process_group=group, no_dist=group is None)


def held_in(source: Path | StorageReader) -> dict[str, Holding]:
    """Every tensor that `source` has, in the boxes that it was written in; those numbered in place of processes."""
    known: dict[tuple[Box, ...], dict[int, Box]] = {}
    found = {}
    for name, entry in _reader(source).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
            parts = known.setdefault(boxes, {index: box for index, box in enumerate(boxes) if box.elements})
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            found[name] = Holding(shape=tuple(entry.size), dtype=dtype, parts=parts)
    return found


def _reader(source: Path | StorageReader) -> StorageReader:
    return FileSystemReader(source) if isinstance(source, Path) else source


@contextmanager
def _alone(group: dist.ProcessGroup | None) -> Iterator[None]:
    """torch warns that a process without a group saves and loads alone, which is what was asked."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
