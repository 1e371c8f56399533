"""The slice of every global batch that one data rank reads, fetched one batch ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshwright.data.pack import Batch, Packed, Position


class Loader:
    """Yields `rows` rows of one global batch after another, from row `first` of each, for ever, from `position` on.

    The global batch that begins at position p is sequences [p, p + batch). `position` is where the next batch to be
    yielded begins.
    """

    def __init__(self, packed: Packed, *, position: Position, batch: int, first: int, rows: int) -> None:
        assert 0 <= first < first + rows <= batch, "rows are of the batch"
        self.position = position
        self._packed, self._batch = packed, batch
        self._first, self._rows = first, rows
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
