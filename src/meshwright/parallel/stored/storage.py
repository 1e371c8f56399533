"""Our files as torch's distributed checkpoints write and read them: torch plans who writes and reads what."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshwright.parallel.stored.blob import THREADS, SpoiltBlock, bytes_of, check_ends, lies_whole, read_part
from meshwright.parallel.stored.index import Entry, Index, Part, SpoiltError, dtype_of, read_index, spoilt, write_index
from meshwright.parallel.stored.writing import Earlier, Key, Written, write_parts


class Writer(StorageWriter):
    """Tensors into `folder`, at `step`; `written` says afterwards which files this rank has there."""

    def __init__(self, folder: Path, *, step: int, earlier: Earlier) -> None:
        self._folder, self._step, self._earlier = folder, step, earlier
        self.written = Written(folder=folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.written = Written(folder=self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is open between saves."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        keys = [_key(item) for item in plan.items]
        self.written = write_parts(
            keys,
            lambda number: planner.resolve_data(plan.items[number]),  # type: ignore[arg-type,return-value]  # no bytes
            self._folder,
            rank=plan.storage_data,
            step=self._step,
            earlier=self._earlier,
        )
        places = {key: (name, place) for name, file in self.written.files.items() for key, place in file.parts.items()}
        results = []
        for item, key in zip(plan.items, keys, strict=True):
            name, place = places[key]
            part = Part(starts=key[1], sizes=key[2], file=name, at=place.at, sums=place.sums)
            results.append(WriteResult(index=item.index, size_in_bytes=0, storage_data=part))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: dict[str, list[Part]] = {}
        for result in (result for one in results for result in one):
            parts.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "only tensors are saved"
            tensors[name] = Entry(
                shape=tuple(entry.size),
                dtype=str(entry.properties.dtype).removeprefix("torch."),
                parts=tuple(sorted(parts.get(name, ()), key=lambda part: part.starts)),
            )
        write_index(self._folder, Index(tensors=tensors))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return not Path(checkpoint_id).is_file()


class Reader(StorageReader):
    """Tensors out of `folder`, parts of the size of a tensor straight into its memory."""

    def __init__(self, folder: Path) -> None:
        """The index is read, and kept. Raises as `read_index`."""
        self.folder = folder
        index = read_index(folder)
        self._parts = {MetadataIndex(name, part.starts): (entry, part) for name, entry, part in index.everything()}
        tensors = {name: _described(entry) for name, entry in index.tensors.items()}
        self._metadata = Metadata(state_dict_metadata=tensors)  # type: ignore[arg-type]  # invariant

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is open between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index is all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts = [self._parts[item.storage_index] for item in plan.items]
        order = sorted(range(len(parts)), key=lambda number: (parts[number][1].file, parts[number][1].at))
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
            names = {part.file for _, part in parts}
            files = {name: stack.enter_context(opened(self.folder / name)) for name in names}

            def read(number: int) -> None:
                entry, part = parts[number]
                try:
                    _read(plan.items[number], targets[number], entry, part, file=files[part.file])
                except SpoiltBlock as error:
                    raise SpoiltError(spoilt(plan.items[number].storage_index.fqn, entry, part, error.number)) from None

            list(pool.map(read, order))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the file, to be read."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _key(item: WriteItem) -> Key:
    data = item.tensor_data
    assert data is not None, "only tensors are saved"
    kind = str(data.properties.dtype).removeprefix("torch.")
    return item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), kind


def _described(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(part.starts), torch.Size(part.sizes)) for part in entry.parts]
    properties = TensorProperties(dtype=dtype_of(entry.dtype))
    return TensorStorageMetadata(properties=properties, size=torch.Size(entry.shape), chunks=chunks)


def _read(item: ReadItem, target: Tensor, entry: Entry, part: Part, *, file: int) -> None:
    """`target` holds what `item` asks of `part`: rows are read, and cut where not all of their elements are meant."""
    starts, sizes = tuple(item.storage_offsets), tuple(item.lengths)
    size, kind = entry.part_bytes(part), dtype_of(entry.dtype)
    check_ends(file, part.at + size)
    start = starts[0] * math.prod(part.sizes[1:]) * kind.itemsize if starts else 0
    if sizes[1:] == part.sizes[1:] and lies_whole(target) and target.dtype == kind:
        read_part(bytes_of(target), file, at=part.at, size=size, sums=part.sums, start=start)
        return
    rows = torch.empty((*sizes[:1], *part.sizes[1:]), dtype=kind)
    read_part(bytes_of(rows), file, at=part.at, size=size, sums=part.sums, start=start)
    for dim in range(1, len(sizes)):
        rows = rows.narrow(dim, starts[dim], sizes[dim])
    with torch.no_grad():
        target.copy_(rows)
