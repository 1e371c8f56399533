"""Parts of a file, read in the order in which they lie there, with every block summed as it comes.

The system reads ahead of one who goes through a file from its beginning to its end, and of nobody who jumps, as several
threads in one file do.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

import numpy as np

from meshwright.parallel.stored.blob import Bytes, block, block_at, num_blocks

FILES_AT_ONCE = 4
PIECE_BYTES = 2**20  # what a processor still has in its own caches when it is to be summed


class Caches(Enum):
    """Whether the system keeps what is read, for others who read it soon, or every byte comes from the disk and is
    forgotten, so that the next is read into the same memory."""

    KEEP = "keep"
    PASS = "pass"


class FileReader:
    """`path`, to be read by one thread."""

    def __init__(self, path: Path, *, caches: Caches) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._caches = caches if hasattr(os, "posix_fadvise") else Caches.KEEP  # not every system can be told
        self._spare: Bytes = np.empty(PIECE_BYTES, dtype=np.uint8)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if self._caches is Caches.PASS:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(
        self,
        into: Bytes,
        *,
        at: int,
        size: int,
        sums: Sequence[int],
        spoilt: Callable[[int], Exception],
        start: int = 0,
    ) -> None:
        """`into` holds what the part of `size` bytes at byte `at` has from its byte `start` on.

        Every block of which something is taken is read once and whole. Raises what `spoilt` gives for the number of a
        block that has not its sum, and OSError where the file ends before the part does.
        """
        self._check_end(at + size)
        stop = start + into.nbytes
        for number in range(block_at(start), num_blocks(stop) if into.nbytes else 0):
            first, last = block(number, size)
            inside = start <= first and last <= stop
            whole: Bytes = into[first - start : last - start] if inside else np.empty(last - first, dtype=np.uint8)
            if self._sum(at + first, at + last, into=whole) != sums[number]:
                raise spoilt(number)
            if not inside:
                begin, end = max(start, first), min(stop, last)
                into[begin - start : end - start] = whole[begin - first : end - first]

    def check(self, *, at: int, size: int, sums: Sequence[int], spoilt: Callable[[int], Exception]) -> None:
        """Every block of the part has its sum; little of it is in memory at a time. Raises as `read`."""
        self._check_end(at + size)
        for number, known in enumerate(sums):
            first, last = block(number, size)
            if self._sum(at + first, at + last) != known:
                raise spoilt(number)

    def _check_end(self, stop: int) -> None:
        size = os.fstat(self._file).st_size
        if stop > size:
            raise OSError(errno.EIO, f"the file ends at byte {size} of {stop}")

    def _sum(self, start: int, stop: int, *, into: Bytes | None = None) -> int:
        """That of bytes [start, stop) of the file, which `into` holds afterwards, where it is given."""
        total, at = 0, start
        while at < stop:
            rest = min(stop - at, PIECE_BYTES)
            piece = self._spare[:rest] if into is None else into[at - start : at - start + rest]
            count = os.preadv(self._file, [piece.data], at)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends at byte {at} of {stop}")
            total, at = zlib.crc32(piece.data[:count], total), at + count
        if self._caches is Caches.PASS:
            os.posix_fadvise(self._file, 0, at, os.POSIX_FADV_DONTNEED)
        return total
