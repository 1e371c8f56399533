"""Features that tensor ranks share: gathered, scattered or reduced around divided parts, or beside their products."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from meshwright.cost.compute import Beside, PassSeconds
from meshwright.cost.lines import Linear
from meshwright.cost.overlap import Contention, Traffic, Way, late_beside
from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray, PlanTable
from meshwright.cost.work import FloatArray, PartWork

IndexArray = npt.NDArray[np.intp]
_TWICE = 2.0  # an all-reduce sends a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLinks:
    """Collectives over the tensor axis, one entry a row."""

    reduce: Linear
    gather: Linear
    scatter: Linear
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a block's tensor ranks exchange in one pass: `waits`, and what runs `beside` products and delays them by
    `held_up`; arrays of shape (rows,).
    """

    waits: Traffic
    beside: Traffic
    held_up: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Both passes, `again` what a forward that is repeated exchanges, and bytes of all tensors `moved` in the two."""

    forward: Features
    again: Features
    backward: Features
    moved: FloatArray


@dataclass(frozen=True, slots=True)
class _Call:
    """Seconds of collectives and the bytes that pass around the ring, shape (rows,)."""

    seconds: FloatArray
    num_bytes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """One collective of each kind over the hidden features, shape (rows,); `split` where sequence parallel is on."""

    split: BoolArray
    hidden: FloatArray
    whole: FloatArray
    gather: FloatArray
    scatter: FloatArray

    @classmethod
    def of(cls, table: PlanTable, *, hidden: FloatArray, links: TensorLinks) -> _Calls:
        kinds = {"whole": links.reduce, "gather": links.gather, "scatter": links.scatter}
        split = np.asarray(table.sequence_parallel, dtype=np.bool_)
        return cls(split=split, hidden=hidden, **{name: link.seconds(hidden) for name, link in kinds.items()})

    def gathered(self, times: FloatArray) -> _Call:
        """So many all-gathers with sequence parallel, and none without."""
        count = np.where(self.split, times, 0.0)
        return _Call(count * self.gather, count * self.hidden)

    def reduced(self, scattered: FloatArray, whole: FloatArray) -> _Call:
        """So many reduce-scatters with sequence parallel, and all-reduces without."""
        seconds = np.where(self.split, scattered * self.scatter, whole * self.whole)
        return _Call(seconds, np.where(self.split, scattered, _TWICE * whole) * self.hidden)


@dataclass(slots=True, kw_only=True)
class _Sum:
    """Features of parts as they are added up."""

    way: Way
    contention: Contention
    waits: Traffic
    beside: Traffic
    held_up: FloatArray

    def add(self, call: _Call, *, window: FloatArray | None = None) -> None:
        """Collectives that are waited for, or beside products that take `window`."""
        traffic = Traffic.over(call.seconds, self.way, num_bytes=call.num_bytes)
        if window is None:
            self.waits = self.waits + traffic
            return
        self.beside = self.beside + traffic
        self.held_up = self.held_up + late_beside(traffic, window, self.contention)

    def features(self) -> Features:
        return Features(waits=self.waits, beside=self.beside, held_up=self.held_up)


def tensor_seconds(
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    table: PlanTable,
    *,
    hidden: FloatArray,
    statistics: FloatArray,
    inverse: IndexArray,
    links: TensorLinks,
    contention: Contention,
    software: Software,
    hides: FloatArray,
) -> Shared:
    """What the parts of a block exchange over the tensor axis.

    `hidden` is bytes of the whole hidden features and `statistics` of what a loss adds up, one entry a row; `hides`
    scales seconds of work to those of the row. Without sequence parallel features are reduced; with it they are
    gathered before a part and scattered after it, and backward the other way round.
    """
    zeros = np.zeros(len(table))
    if not np.any(table.tensor > 1):
        nothing = Features(waits=Traffic.none(zeros), beside=Traffic.none(zeros), held_up=zeros)
        return Shared(forward=nothing, again=nothing, backward=nothing, moved=zeros)
    forward, repeated, backward = (
        _Sum(way=links.way, contention=contention, waits=Traffic.none(zeros), beside=Traffic.none(zeros), held_up=zeros)
        for _ in range(3)
    )
    calls, share, moved = _Calls.of(table, hidden=hidden, links=links), 1.0 - 1.0 / table.tensor, zeros
    for part, seconds in zip(works, passes, strict=True):
        count, times = part.exchanges, np.broadcast_to(part.exchanged, seconds.forward.shape)[inverse]
        window = _windows(seconds.products, inverse, hides)
        pieces = software.pieces and not np.any(part.expert_parameters) and len(part.products) > 1
        beside = software.hides_gradients and len(part.products) > 1
        small = count.small * times * statistics
        few = _Call(count.small * times * links.reduce.seconds(statistics), _TWICE * small)
        ahead = calls.gathered(times * count.gathers_forward)
        after = calls.reduced(times * count.scatters_forward, times * count.forward)
        stops = part is works[-1] and part.closes and software.stops_early
        for way in (forward, repeated):
            way.add(few)
            way.add(ahead, window=share * window["entering"] if pieces else None)
            if way is forward or not stops:
                way.add(after, window=np.where(calls.split, share * window["leaving"], 0.0) if pieces else None)
        back = calls.gathered(times * count.gathers_backward)
        late = calls.reduced(times * count.scatters_backward, times * count.backward)
        again = calls.gathered(times * count.gathers_forward * software.regathers)
        backward.add(back, window=share * window["leaving_data"] if pieces else None)
        backward.add(late, window=window["entering_weight"] if beside else None)
        backward.add(again, window=window["entering_data"] if beside else None)
        twice = np.where(calls.split, 1.0, _TWICE)
        moved = moved + small + sum((call.num_bytes / twice for call in (ahead, after, back, late, again)), zeros)
    return Shared(
        forward=forward.features(),
        again=repeated.features(),
        backward=backward.features(),
        moved=np.where(table.tensor > 1, moved, 0.0),
    )


def _windows(products: Beside, inverse: IndexArray, hides: FloatArray) -> dict[str, FloatArray]:
    """Seconds of products row by row."""
    return {field.name: getattr(products, field.name)[inverse] * hides for field in fields(products)}
