"""A disk that is full, for this process and those that it starts."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

ROOM_BYTES = 4096


@contextmanager
def a_full_disk() -> Iterator[None]:
    """No file grows beyond ROOM_BYTES, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
