"""The slice of every global batch that one data rank reads, fetched one batch ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshwright.data.pack import Batch, Packed, Position


class Loader:
    """Yields rank `replica`'s rows of one global batch after another, for ever, from `position` on.

    The global batch that begins at position p is sequences [p, p + batch); rank r of n reads rows
    [r * batch / n, (r + 1) * batch / n), so the ranks together read each sequence once whatever n is. `position`
    is where the next batch to be yielded begins.
    """

    def __init__(self, packed: Packed, *, position: Position, batch: int, replica: int, replicas: int) -> None:
        assert batch % replicas == 0, "a legal plan divides its batch among data ranks"
        assert 0 <= replica < replicas
        self.position = position
        self._packed, self._batch = packed, batch
        self._first, self._rows = replica * (batch // replicas), batch // replicas
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._next: Future[Batch] = self._fetch()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ready = self._next.result()
        self.position = self.position.after(self._batch)
        self._next = self._fetch()
        return ready

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch(self) -> Future[Batch]:
        start = self.position.consumed + self._first
        return self._thread.submit(self._packed.at, np.arange(start, start + self._rows, dtype=np.int64))
