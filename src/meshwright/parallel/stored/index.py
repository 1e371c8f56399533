"""The index of stored tensors: of each its shape and type, and where every part of it lies, with its sums."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.parallel.stored.blob import block, num_blocks
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.json_text import parse_json

INDEX = "index.json"
MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements [start, start + size) of every dim, row by row from byte `at` of `file`, which lies beside the index.

    `sums` are of its blocks.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor; `dtype` is torch's name of its type."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @property
    def item_bytes(self) -> int:
        return dtype_of(self.dtype).itemsize

    def part_bytes(self, part: Part) -> int:
        return math.prod(part.sizes) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    tensors: Mapping[str, Entry]
    schema: int = 2

    def everything(self) -> Iterator[tuple[str, Entry, Part]]:
        """Every part with its tensor, in the order of the files."""
        found = [(name, entry, part) for name, entry in self.tensors.items() for part in entry.parts]
        return iter(sorted(found, key=lambda each: (each[2].file, each[2].at)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoilt:
    """Bytes [start, stop) of `file`, a block of a part of `tensor`, are not those that were written."""

    file: str
    tensor: str
    start: int
    stop: int


class SpoiltError(Exception):
    """What was to be read is spoilt."""

    def __init__(self, spoilt: Spoilt) -> None:
        super().__init__(spoilt)
        self.spoilt = spoilt


def spoilt_error(tensor: str, entry: Entry, part: Part, number: int) -> SpoiltError:
    """Block `number` of `part` is spoilt."""
    start, stop = block(number, entry.part_bytes(part))
    return SpoiltError(Spoilt(file=part.file, tensor=tensor, start=part.at + start, stop=part.at + stop))


def dtype_of(name: str) -> torch.dtype:
    """torch's type of that name. Raises ValueError where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no type {name!r}")
    return found


def write_index(folder: Path, index: Index) -> None:
    """`folder` has the index, and keeps it through a power cut. Raises OSError where it does not read back."""
    path, text = folder / INDEX, json.dumps(codec.encode(index))
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if path.read_text(encoding="utf-8") != text:
        raise OSError(f"{path} does not read back as it was written")


def read_index(folder: Path) -> Index:
    """The index of `folder`. Raises OSError where it cannot be read, and ConfigError where it is not one: no part lies
    outside its tensor, or in a file that is not in `folder`."""
    path = folder / INDEX
    try:
        index = codec.decode(Index, parse_json(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(Problem(what=f"the index cannot be read: {error}", where=str(path))) from error
    except ConfigError as error:
        told = [replace(one, where=f"{path}: {one.where}".rstrip(": ")) for one in error.problems[:MOST_TOLD]]
        raise ConfigError(told) from error
    problems = [Problem(what=f"the index is not one: {what}", where=str(path)) for what in _wrong(index)]
    if problems:
        raise ConfigError(problems[:MOST_TOLD])
    return index


def _wrong(index: Index) -> Iterator[str]:
    for name, entry in index.tensors.items():
        try:
            dtype_of(entry.dtype)
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        for part in entry.parts:
            bounds = zip(part.starts, part.sizes, entry.shape, strict=False)
            inside = all(start >= 0 and size >= 0 and start + size <= whole for start, size, whole in bounds)
            if not (inside and len(part.starts) == len(part.sizes) == len(entry.shape)):
                yield f"{name} is {entry.shape} and has a part {part.sizes} at {part.starts}"
            elif len(part.sums) != num_blocks(entry.part_bytes(part)):
                yield f"{name} has a part {part.sizes} of {len(part.sums)} sums"
            if part.at < 0 or part.file in ("", ".", "..") or "\0" in part.file or Path(part.file).name != part.file:
                yield f"{name} has a part at {part.at} of {part.file!r}"
