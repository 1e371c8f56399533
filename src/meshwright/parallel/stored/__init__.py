"""State in files: written, read, checked, and what of every tensor is there.

torch's distributed checkpoints say who writes and who reads which part; the files are our own: the bytes of tensors,
and an index in JSON. Nothing in them is ever executed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

from meshwright.cost.holdings import Box, Holding
from meshwright.parallel.stored.index import INDEX, Entry, Part, Spoilt, SpoiltError, read_index, spoilt_error
from meshwright.parallel.stored.reading import FILES_AT_ONCE, Caches, FileReader
from meshwright.parallel.stored.storage import Reader, Writer
from meshwright.parallel.stored.uneven import told
from meshwright.parallel.stored.writing import Earlier, Written

__all__ = [
    "INDEX",
    "Earlier",
    "Reader",
    "Spoilt",
    "SpoiltError",
    "Written",
    "held_in",
    "read",
    "spoilt_part",
    "sums",
    "write",
]

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

    Every file is on the disk and reads back as it was written, or OSError is raised, which says on which rank of others
    it was not. What is as in a file of `earlier` is referred to. A `planner` of its own may make what is saved while it
    is written.
    """
    writer = Writer(folder, step=step, earlier=earlier)
    with _alone(group), _told_whose(group):
        known = {name: told(x) for name, x in tensors.items()}
        save(known, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return writer.written


def read(targets: Mapping[str, Tensor], source: StorageReader, *, group: dist.ProcessGroup | None) -> None:
    """`targets` hold what `source` has under their names, each rank its part, of which every byte is read once.

    Raises SpoiltError where one is not as it was written, and OSError where it cannot be read, on every rank what the
    first found.
    """
    known = {name: told(x) for name, x in targets.items()}
    with _alone(group), _first_failure():
        load(known, storage_reader=source, process_group=group, no_dist=group is None)


def held_in(source: StorageReader) -> dict[str, Holding]:
    """Every tensor that `source` has, in the boxes that it was written in; those numbered in place of processes."""
    known: dict[tuple[Box, ...], dict[int, Box]] = {}
    found = {}
    for name, entry in source.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
            parts = known.setdefault(boxes, {index: box for index, box in enumerate(boxes) if box.elements})
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            found[name] = Holding(shape=tuple(entry.size), dtype=dtype, parts=parts)
    return found


def spoilt_part(folder: Path, *, index: int = 0, ways: int = 1) -> Spoilt | None:
    """The first block whose bytes are not those that were written; None where all are.

    Share `index` of `ways` of the parts is read. Raises OSError where a file cannot be.
    """
    files: dict[str, list[tuple[str, Entry, Part]]] = {}
    for name, entry, part in list(read_index(folder).everything())[index::ways]:
        files.setdefault(part.file, []).append((name, entry, part))

    def look(file: str) -> Spoilt | None:
        try:
            with FileReader(folder / file, caches=Caches.PASS) as reader:
                for name, entry, part in files[file]:
                    told = partial(spoilt_error, name, entry, part)
                    reader.check(at=part.at, size=entry.part_bytes(part), sums=part.sums, spoilt=told)
        except SpoiltError as error:
            return error.spoilt
        return None

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return next((found for found in pool.map(look, files) if found is not None), None)


def sums(folder: Path) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """Those of the blocks of every part that `folder` says it has, by tensor and where the part begins."""
    return {(name, part.starts): part.sums for name, _, part in read_index(folder).everything()}


@contextmanager
def _told_whose(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What torch tells of all ranks at once is raised as what this one found, or else as what the first of others did,
    with its rank."""
    try:
        yield
    except CheckpointException as error:
        if group is None:
            raise
        own = dist.get_rank(group)
        rank = own if own in error.failures else min(error.failures)
        found, _ = error.failures[rank]
        if isinstance(found, OSError):
            raise found if rank == own else OSError(f"{found} on rank {rank}") from None
        raise


@contextmanager
def _first_failure() -> Iterator[None]:
    """What torch tells of all ranks at once is raised as what the first found, where that is of files."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, SpoiltError | OSError):
            raise first from None
        raise


@contextmanager
def _alone(group: dist.ProcessGroup | None) -> Iterator[None]:
    """torch warns that a process without a group saves and loads alone, which is what was asked."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
