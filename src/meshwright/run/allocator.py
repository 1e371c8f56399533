"""The C library's memory of a worker on a processor: large blocks stay with the process when they are freed.

glibc returns a large freed block to the system and takes fresh pages for the next one, each to be mapped and zeroed
before it is written: an element-wise operator over 32 MiB then takes 16 ms instead of 2 (docs/lab.md).
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MAPPED_THRESHOLD = -1, -3  # glibc's names: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Blocks up to 2 GiB come from the heap and the heap does not shrink; False where the C library is another."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, _LARGEST) == 1 for name in (_TRIM_THRESHOLD, _MAPPED_THRESHOLD))
