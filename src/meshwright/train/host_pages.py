"""Pages of the host's memory, which the system gives one at a time as each is first written, and empties before.

That takes many times as long as to copy into memory that is there (docs/lab.md); asked for at once they take half.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_POPULATE = 23  # Linux's MADV_POPULATE_WRITE, of 5.14 and later


def get_pages(x: Tensor, *, start: int = 0, stop: int | None = None) -> bool:
    """Bytes `start` to `stop` of x, memory of the host, are there to be written, whatever is in them; False where the
    system gives pages only one at a time."""
    if not sys.platform.startswith("linux"):
        return False
    first = (x.data_ptr() + start) // mmap.PAGESIZE * mmap.PAGESIZE
    size = x.data_ptr() + (x.nbytes if stop is None else min(stop, x.nbytes)) - first
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(size > 0 and advise(first, size, _POPULATE) == 0)
