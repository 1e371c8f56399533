"""Features that tensor ranks share: gathered, scattered or reduced around divided parts, or beside their products."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from meshwright.cost.compute import Beside, PassSeconds
from meshwright.cost.lines import Linear
from meshwright.cost.overlap import Contention, Traffic, late_beside
from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray, PlanTable
from meshwright.cost.work import FloatArray, PartWork

IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLinks:
    """Collectives over the tensor axis, one entry a row; `far` where adapters join its ranks."""

    reduce: Linear
    gather: Linear
    scatter: Linear
    far: BoolArray


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
    """Both passes, and bytes of all tensors `moved` in them."""

    forward: Features
    backward: Features
    moved: FloatArray


@dataclass(slots=True, kw_only=True)
class _Sum:
    """Features of parts as they are added up."""

    far: BoolArray
    contention: Contention
    waits: FloatArray
    beside: FloatArray
    held_up: FloatArray

    def add(self, seconds: FloatArray, *, window: FloatArray | None = None) -> None:
        """Collectives of `seconds`, waited for or beside products that take `window`."""
        if window is None:
            self.waits = self.waits + seconds
            return
        self.beside = self.beside + seconds
        self.held_up = self.held_up + late_beside(Traffic.over(seconds, far=self.far), window, self.contention)

    def features(self) -> Features:
        over = Traffic.over
        return Features(
            waits=over(self.waits, far=self.far), beside=over(self.beside, far=self.far), held_up=self.held_up
        )


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
    split, several = table.sequence_parallel, table.tensor > 1
    whole, gather, scatter = (link.seconds(hidden) for link in (links.reduce, links.gather, links.scatter))
    zeros = np.zeros(len(table))
    forward, backward = (
        _Sum(far=links.far, contention=contention, waits=zeros, beside=zeros, held_up=zeros) for _ in range(2)
    )
    moved = zeros
    share = 1.0 - 1.0 / table.tensor
    for part, seconds in zip(works, passes, strict=True):
        count, times = part.exchanges, np.broadcast_to(part.exchanged, seconds.forward.shape)[inverse]
        window = _windows(seconds.products, inverse, hides)
        small = count.small * times
        forward.add(small * links.reduce.seconds(statistics))
        moved = moved + small * statistics
        pieces = software.pieces and not np.any(part.expert_parameters) and len(part.products) > 1
        beside = software.hides_gradients and len(part.products) > 1
        ahead = np.where(split, count.gathers_forward * gather, 0.0) * times
        after = np.where(split, count.scatters_forward * scatter, count.forward * whole) * times
        forward.add(ahead, window=share * window["entering"] if pieces else None)
        forward.add(np.where(split, after, 0.0), window=share * window["leaving"] if pieces else None)
        forward.add(np.where(split, 0.0, after))
        back = np.where(split, count.gathers_backward * gather, 0.0) * times
        late = np.where(split, count.scatters_backward * scatter, count.backward * whole) * times
        backward.add(back, window=share * window["leaving_data"] if pieces else None)
        backward.add(late, window=window["entering_weight"] if beside else None)
        again = np.where(split & software.regathers, count.gathers_forward * gather, 0.0) * times
        backward.add(again, window=window["entering_data"] if beside else None)
        number = np.where(split, count.gathers_forward + count.scatters_forward, count.forward)
        number = number + np.where(split, count.gathers_backward + count.scatters_backward, count.backward)
        number = number + np.where(split & software.regathers, count.gathers_forward, 0.0)
        moved = moved + number * hidden * times
    return Shared(forward=forward.features(), backward=backward.features(), moved=np.where(several, moved, 0.0))


def _windows(products: Beside, inverse: IndexArray, hides: FloatArray) -> dict[str, FloatArray]:
    """Seconds of products row by row."""
    return {field.name: getattr(products, field.name)[inverse] * hides for field in fields(products)}
