"""The header of a safetensors file: which tensors it holds and where, trusting nothing that it says.

A file is eight bytes of length (little-endian), so many bytes of JSON, and the tensors' bytes one after another
(https://github.com/huggingface/safetensors, the format). Whatever a file says, no offset that leaves it is believed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.json_text import once, parse_json

LONGEST_HEADER = 100_000_000
ALIGNMENT = 8
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64"), 8),
        **dict.fromkeys(("F32", "I32", "U32"), 4),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
        **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file: bytes [start, stop) from the beginning of the file, in rows of the last dim."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> Mapping[str, Entry]:
    """The tensors of the file by name. Raises ConfigError when it cannot be read or is not what it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise _bad(path, f"a header of {length:,} bytes in a file of {size:,}")
            text = file.read(length)
    except (OSError, ValueError) as error:
        raise _bad(path, getattr(error, "strerror", None) or str(error)) from error
    try:
        values = parse_json(text, pairs=once)
    except ValueError as error:
        raise _bad(path, f"its header is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _bad(path, "its header is not a table")
    begin = 8 + length
    entries = {name: _entry(path, name, value, begin=begin) for name, value in values.items() if name != "__metadata__"}
    _check_places(path, entries, begin=begin, size=size)
    return MappingProxyType(entries)


def write_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file of these tensors (dtype and shape by name), which follow in this order."""
    told: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape) in tensors.items():
        stop = place + ITEM_BYTES[dtype] * math.prod(shape)
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entry(path: Path, name: str, value: Any, *, begin: int) -> Entry:
    told: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype = str(told.get("dtype"))
    shape: Any = told.get("shape")
    offsets: Any = told.get("data_offsets")
    if dtype not in ITEM_BYTES:
        raise _bad(path, f"{name} has the unknown type {dtype!r}")
    if not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise _bad(path, f"{name} has no shape and place in whole numbers")
    expected = ITEM_BYTES[dtype] * math.prod(shape)
    if offsets[1] - offsets[0] != expected:
        what = f"{name} is {expected:,} bytes of {dtype} {tuple(shape)} in a place of {offsets[1] - offsets[0]:,}"
        raise _bad(path, what)
    return Entry(dtype=dtype, shape=tuple(shape), start=begin + offsets[0], stop=begin + offsets[1])


def _check_places(path: Path, entries: Mapping[str, Entry], *, begin: int, size: int) -> None:
    """The tensors fill the file from the header to its end, none over another."""
    place = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != place:
            told = "overlaps the tensor before it" if entry.start < place else "leaves a hole before it"
            raise _bad(path, f"{name} {told}")
        place = entry.stop
    if place != size:
        raise _bad(path, f"it ends at byte {size:,} and its tensors at {place:,}")


def _whole(values: Any) -> bool:
    """A list of whole numbers from 0, small enough that no product of them is out of hand."""
    if not isinstance(values, list) or len(values) > 16:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**62 for item in values)


def _bad(path: Path, why: str) -> ConfigError:
    fix = "download it again, or name another folder"
    return ConfigError(Problem(what="not a safetensors file", where=str(path), why=why, fix=fix))
