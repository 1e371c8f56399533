"""Sizes of the buckets in which a rank's gradients meet: runs of parameters from the last one of a stage on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshwright.cost.layouts import Backward, Kind
from meshwright.cost.optimizers import Optimized, Treated
from meshwright.cost.states import BUCKET_BYTES, state_bytes
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Embedding, Head

_MOST_ALIKE = 8  # layers of a kind in a row whose buckets are told one by one; those of more are like these


class Ready(StrEnum):
    """Whose gradients, which come last of a bucket's, make it whole."""

    HEAD = "head"
    LAYER = "layer"
    TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizes:
    """Elements of every rank, shape (rows, ranks): of all buckets, of the `first` one and the `largest`, and of the
    largest that is whole at a `head`, a `layer` and a `table`."""

    all_: FloatArray
    first: FloatArray
    largest: FloatArray
    head: FloatArray
    layer: FloatArray
    table: FloatArray


def bucket_sizes(found: Optimized, owned: FloatArray) -> BucketSizes:
    """Of the blocks and ranks of `found`, which own so many trained parameters, (rows, ranks); without experts on a
    grid, whose gradients meet by themselves where they are not sharded."""
    total, kinds = found.counts["total"], found.arrays.kinds
    filled = _Filled.empty(found, shape=owned.shape)
    apart = np.zeros_like(owned)
    for index, kind in reversed(list(enumerate(kinds))):
        number = total[..., index]
        if kind.backward is not Backward.WHOLE or not number.any():
            continue
        tensors = list({entry.tensor.name: entry for entry in found.held(kind)}.values())
        away = [_meets_alone(entry, found) for entry in tensors]
        for turn in range(int(min(number.max(), _MOST_ALIKE))):
            for entry, alone in reversed(list(zip(tensors, away, strict=True))):
                here = (number > turn) & ~alone[:, None]
                filled = filled.with_parameter(entry.local[:, None], here, ready=_ready(kind))
        for entry, alone in zip(tensors, away, strict=True):
            apart = apart + number * np.where(alone, entry.local, 0.0)[:, None]
    return filled.sizes(np.maximum(owned - apart, 0.0))


def _ready(kind: Kind) -> Ready:
    if isinstance(kind.block, Embedding):
        return Ready.TABLE
    return Ready.HEAD if isinstance(kind.block, Head) else Ready.LAYER


def _meets_alone(entry: Treated, found: Optimized) -> BoolArray:
    return np.asarray(found.table.on_grid & (found.table.sharding == 0) & entry.tensor.grid)


@dataclass(slots=True, kw_only=True)
class _Filled:
    """Buckets so far, shape (rows, ranks): elements in the `open` one, whose last gradient is of `last`, the `first`
    one that is full, and the largest full ones by what makes them whole. `each` are bytes of an element."""

    each: FloatArray
    open: FloatArray
    last: FloatArray
    first: FloatArray
    full: dict[Ready, FloatArray]

    @classmethod
    def empty(cls, found: Optimized, *, shape: tuple[int, ...]) -> _Filled:
        nothing = np.zeros(shape)
        each = state_bytes(found.table).master[:, None]
        return cls(each=each, open=nothing, last=nothing, first=nothing, full=dict.fromkeys(Ready, nothing))

    def with_parameter(self, size: FloatArray, here: BoolArray, *, ready: Ready) -> _Filled:
        """One more parameter of `size` elements where it is `here`, which opens a bucket where it does not fit in."""
        opens = here & (self.open > 0.0) & ((self.open + size) * self.each > BUCKET_BYTES)
        closed = self._closed(opens)
        return _Filled(
            each=self.each,
            open=np.where(here, np.where(opens, 0.0, self.open) + size, self.open),
            last=np.where(here, float(list(Ready).index(ready)), self.last),
            first=closed.first,
            full=closed.full,
        )

    def sizes(self, all_: FloatArray) -> BucketSizes:
        found = self._closed(self.open > 0.0)
        at = {str(ready): np.minimum(values, all_) for ready, values in found.full.items()}
        return BucketSizes(
            all_=all_, first=np.minimum(found.first, all_), largest=np.max(list(at.values()), axis=0), **at
        )

    def _closed(self, which: BoolArray) -> _Filled:
        full = {
            ready: np.where(which & (self.last == place), np.maximum(self.full[ready], self.open), self.full[ready])
            for place, ready in enumerate(Ready)
        }
        first = np.where(which & (self.first == 0.0), self.open, self.first)
        return _Filled(each=self.each, open=self.open, last=self.last, first=first, full=full)
