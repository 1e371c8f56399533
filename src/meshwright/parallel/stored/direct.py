"""A file that is written from its beginning to its end past the caches of the system, where it can be.

The way through those caches takes a processor many times what it takes to let the disk move the bytes itself.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from meshwright.parallel.stored.blob import Bytes

AT_ONCE = 2**22  # enough that a thread seldom waits for its turn on busy cores
ALIGNED = 4096  # what disks take is of whole such blocks, in memory and in the file
FLUSH_BYTES = 2**25
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it


class DirectFile:
    """`path` is begun. Of two pieces of memory one is filled while a thread of `pool` writes the other."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._direct = self._set_direct(on=True)
        self._pool = pool
        self._memory: list[Bytes] = [_aligned(), _aligned()]
        self._filled = 0
        self._unflushed = 0
        self._writing: Future[None] | None = None
        self.bytes = 0

    def append(self, data: Bytes) -> None:
        """The file ends with `data`, whose memory may change afterwards. Raises OSError where it cannot be written."""
        while data.nbytes:
            part = data[: AT_ONCE - self._filled]
            self._memory[0][self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            self.bytes += part.nbytes
            data = data[part.nbytes :]
            if self._filled == AT_ONCE:
                self._begin_write()

    def finish(self) -> None:
        """All is on the disk. Raises OSError where it is not."""
        self._begin_write()
        self._wait()
        os.ftruncate(self._file, self.bytes)  # the last write was of whole blocks
        os.fsync(self._file)
        self._memory.clear()

    def close(self) -> None:
        os.close(self._file)

    def _begin_write(self) -> None:
        """What is filled is written, and the other memory, which was written before, is the next to be filled."""
        self._wait()
        whole = -(-self._filled // ALIGNED) * ALIGNED
        self._writing = self._pool.submit(self._write, self._memory[0].data[:whole])
        self._memory.reverse()
        self._filled = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                count = os.write(self._file, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = self._set_direct(on=False)  # a disk of larger blocks
                continue
            data = data[count:]
            self._unflushed += count
        if not self._direct and self._unflushed >= FLUSH_BYTES:
            os.fsync(self._file)  # so that the disk has begun before the end
            self._unflushed = 0

    def _set_direct(self, *, on: bool) -> bool:
        """Whether the file is written past the caches from here on: `on`, where its file system can."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
        except OSError:
            return False
        return on and bool(_DIRECT)


def _aligned() -> Bytes:
    """Memory that begins where a disk may reach it."""
    return np.frombuffer(mmap.mmap(-1, AT_ONCE), dtype=np.uint8)
