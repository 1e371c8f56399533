"""Safetensors files as tensors: read by views of mapped files, written one tensor at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch
from torch import Tensor

from meshwright.catalog.huggingface.folder import Stored
from meshwright.catalog.huggingface.header import write_header

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


class MappedFiles:
    """The tensors of some files. Nothing is read before it is looked at, and what was is the system's to forget."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, name: str) -> Tensor:
        """A view of the whole tensor; writing into it changes no file."""
        stored = self._tensors[name]
        entry, dtype = stored.entry, DTYPES[stored.entry.dtype]
        if entry.stop == entry.start:
            return torch.empty(entry.shape, dtype=dtype)
        count = (entry.stop - entry.start) // dtype.itemsize
        mapped = self._map(stored.file)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]


def write_file(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, make: Callable[[str], Tensor]
) -> None:
    """`path` holds the tensors of these names, types and shapes, each made in its turn, and survives a power cut.

    Nothing is at `path` before all is written. Raises OSError, and ValueError for a tensor that is not as announced.
    """
    fresh = path.with_name(f"{path.name}.partial")
    with fresh.open("wb") as file:
        file.write(write_header(tensors, metadata={"format": "pt"}))
        for name, (dtype, shape) in tensors.items():
            _write_tensor(file, name, make(name), shape=shape, dtype=DTYPES[dtype])
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _write_tensor(file: BinaryIO, name: str, tensor: Tensor, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, announced as {shape} of {dtype}")
    file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
