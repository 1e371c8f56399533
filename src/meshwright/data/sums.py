"""Checksums of a large file by the block: each is looked at when something of it is read for the first time.

A start reads nothing of the text, however long it is, and a run reads no block twice for its sum.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.spec.errors import EnvironmentUnfit, Problem

BLOCK_BYTES = 64 << 10  # some windows of a few thousand tokens, read and summed in some 50 us


def sums_of(path: Path) -> npt.NDArray[np.uint32]:
    """The CRC-32 of every block of the file, the last of which may be shorter."""
    found = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            found.append(zlib.crc32(block))
    return np.array(found, dtype=np.uint32)


class Summed:
    """An array in a file that is read by the slice. What is given is what was written.

    Where it is not, `index` is removed, without which nobody takes the folder for whole, and EnvironmentUnfit raised.
    """

    def __init__(self, path: Path, *, dtype: npt.DTypeLike, sums: npt.NDArray[np.uint32], index: Path) -> None:
        self._path, self._index, self._sums = path, index, sums
        self._values: npt.NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")
        self._bytes = self._values.data.cast("B")
        self._seen = np.zeros(len(sums), dtype=bool)
        if len(sums) != -(-len(self._bytes) // BLOCK_BYTES):
            raise ValueError("there is not one sum for every block")

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._values.dtype

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, stretch: slice) -> npt.NDArray[Any]:
        start, stop, _ = stretch.indices(len(self))
        self._check(start * self.dtype.itemsize, stop * self.dtype.itemsize)
        return self._values[stretch]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self[:], dtype=dtype)

    def verify(self) -> None:
        """Every block is what was written."""
        self._check(0, len(self._bytes))

    def _check(self, start: int, stop: int) -> None:
        if stop <= start:
            return
        first = start // BLOCK_BYTES
        unseen = np.flatnonzero(~self._seen[first : (stop - 1) // BLOCK_BYTES + 1]) + first
        for block in unseen.tolist():
            begin = block * BLOCK_BYTES
            if zlib.crc32(self._bytes[begin : begin + BLOCK_BYTES]) != self._sums[block]:
                self._refuse(begin)
            self._seen[block] = True

    def _refuse(self, begin: int) -> None:
        with suppress(OSError):
            self._index.unlink(missing_ok=True)
        gone = not self._index.exists()
        raise EnvironmentUnfit(
            Problem(
                what="the tokenised text is not what was written",
                where=f"{self._path}, bytes {begin:,} to {min(begin + BLOCK_BYTES, len(self._bytes)) - 1:,}",
                why="a bit of it was turned on the disk, or somebody wrote into it",
                fix="start again: it is made anew" if gone else f"delete {self._path.parent}: it is made anew",
            )
        )
