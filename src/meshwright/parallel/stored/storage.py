"""Our files as torch's distributed checkpoints write and read them: torch plans who writes and reads what."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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

from meshwright.parallel.stored.blob import bytes_of, lies_whole
from meshwright.parallel.stored.index import Entry, Index, Part, dtype_of, read_index, spoilt_error, write_index
from meshwright.parallel.stored.reading import FILES_AT_ONCE, Caches, FileReader
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
        """Every rank is told which files several of them read."""
        files = [{self._parts[item.storage_index][1].file for item in plan.items} for plan in plans]
        readers = Counter(name for each in files for name in each)
        shared = frozenset(name for name, count in readers.items() if count > 1)
        return [replace(plan, storage_data=shared) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Of each file one thread goes from its beginning to its end."""
        wanted: dict[str, list[_Wanted]] = {}
        for item in plan.items:
            entry, part = self._parts[item.storage_index]
            one = _Wanted(item=item, target=planner.resolve_tensor(item).detach(), entry=entry, part=part)
            wanted.setdefault(part.file, []).append(one)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(partial(self._read_file, shared=plan.storage_data), wanted, wanted.values()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, wanted: list[_Wanted], *, shared: Collection[str]) -> None:
        with FileReader(self.folder / name, caches=Caches.KEEP if name in shared else Caches.PASS) as file:
            for one in sorted(wanted, key=lambda one: one.part.at):
                one.read(file)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """`target` is to hold what `item` asks of `part`."""

    item: ReadItem
    target: Tensor
    entry: Entry
    part: Part

    def read(self, file: FileReader) -> None:
        """Rows are read, and cut where not all of their elements are meant. Raises as `FileReader.read`."""
        starts, sizes = tuple(self.item.storage_offsets), tuple(self.item.lengths)
        kind, across = dtype_of(self.entry.dtype), self.part.sizes[1:]
        start = starts[0] * math.prod(across) * kind.itemsize if starts else 0
        if sizes[1:] == across and lies_whole(self.target) and self.target.dtype == kind:
            self._read_rows(self.target, file, start=start)
            return
        rows = torch.empty((*sizes[:1], *across), dtype=kind)
        self._read_rows(rows, file, start=start)
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, starts[dim], sizes[dim])
        with torch.no_grad():
            self.target.copy_(rows)

    def _read_rows(self, into: Tensor, file: FileReader, *, start: int) -> None:
        part, size = self.part, self.entry.part_bytes(self.part)
        told = partial(spoilt_error, self.item.storage_index.fqn, self.entry, part)
        file.read(bytes_of(into), at=part.at, size=size, sums=part.sums, spoilt=told, start=start)


def _key(item: WriteItem) -> Key:
    data = item.tensor_data
    assert data is not None, "only tensors are saved"
    kind = str(data.properties.dtype).removeprefix("torch.")
    return item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), kind


def _described(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(part.starts), torch.Size(part.sizes)) for part in entry.parts]
    properties = TensorProperties(dtype=dtype_of(entry.dtype))
    return TensorStorageMetadata(properties=properties, size=torch.Size(entry.shape), chunks=chunks)
