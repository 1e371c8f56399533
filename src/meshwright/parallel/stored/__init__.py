"""State in files: written, read, checked, and what of every tensor is there.

torch's distributed checkpoints say who writes and who reads which part; the files are our own: the bytes of tensors,
and an index in JSON. Nothing in them is ever executed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

from meshwright.cost.holdings import Box, Holding
from meshwright.parallel.stored.blob import THREADS, checksum_of_file
from meshwright.parallel.stored.index import INDEX, Entry, Part, read_index
from meshwright.parallel.stored.storage import Reader, Writer, opened
from meshwright.parallel.stored.writing import Earlier, Written

__all__ = ["INDEX", "Earlier", "Written", "held_in", "read", "spoilt_part", "sums", "write"]

AHEAD_BYTES = 2**27
AHEAD_OF_MAKING_BYTES = 0  # what is made while it is written should not be in memory before
_NOTHING = Earlier()


def write(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    group: dist.ProcessGroup | None,
    planner: SavePlanner | None = None,
    step: int = 0,
    earlier: Earlier = _NOTHING,
) -> Written:
    """`folder` holds `tensors` of all ranks of `group`, which each give what they keep; None is one process alone.

    Every file is on the disk and reads back as it was written, or OSError is raised. What is as in a file of `earlier`
    is referred to. A `planner` of its own may make what is saved while it is written.
    """
    ahead = AHEAD_BYTES if planner is None else AHEAD_OF_MAKING_BYTES
    writer = Writer(folder, step=step, earlier=earlier, ahead_bytes=ahead)
    with _alone(group):
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return writer.written


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


def spoilt_part(folder: Path, *, index: int = 0, ways: int = 1) -> tuple[str, str] | None:
    """File and tensor of the first part whose bytes are not those that were written; None where all are.

    Share `index` of `ways` of the parts is read. Raises OSError where a file cannot be.
    """
    parts = list(read_index(folder).everything())[index::ways]
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
        files = {file: stack.enter_context(opened(folder / file)) for file in {part.file for _, _, part in parts}}

        def is_right(each: tuple[str, Entry, Part]) -> bool:
            _, entry, part = each
            return checksum_of_file(files[part.file], at=part.at, size=entry.part_bytes(part)) == part.sha256

        for right, (name, _, part) in zip(pool.map(is_right, parts), parts, strict=True):
            if not right:
                return part.file, name
    return None


def sums(folder: Path) -> dict[tuple[str, tuple[int, ...]], str]:
    """The checksum of every part that `folder` says it has, by tensor and where the part begins."""
    return {(name, part.starts): part.sha256 for name, _, part in read_index(folder).everything()}


def _reader(source: Path | StorageReader) -> StorageReader:
    return Reader(source) if isinstance(source, Path) else source


@contextmanager
def _alone(group: dist.ProcessGroup | None) -> Iterator[None]:
    """torch warns that a process without a group saves and loads alone, which is what was asked."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
