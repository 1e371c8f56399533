"""Bytes that buckets of gradients take while they meet rounded, compressed or cast, beside the gradients themselves.

A bucket is made small and sets out when its gradients are ready in a step's last backward. After that backward all of
them turn, where what follows the first collective is sent, and land, one after another (`parallel.buckets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.cost.buckets import BucketSizes, bucket_sizes
from meshwright.cost.compression import factored
from meshwright.cost.extents import Extent
from meshwright.cost.optimizers import Optimized
from meshwright.cost.states import replicas_meeting, state_bytes
from meshwright.cost.table import PRECISIONS, BoolArray, PlanTable
from meshwright.cost.traffic_compression import CHUNK_PLACE_BYTES, PLACE_BYTES
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.optimizer import Master
from meshwright.spec.synchronize import CACHED_ELEMENTS, PACKINGS, PIECE_ELEMENTS, PIECES

_PLACE = 8.0  # bytes of an element's place until it is sent
_EIGHTH = 1.0 / 8.0  # of a byte for a sign
# Bytes beside an element in full that is rounded, and that is read: as halves, by which e4m3 is made.
_WRITTEN_BYTES, READ_BYTES = (
    [each if precision is Precision.FP8 else 0.0 for precision in PRECISIONS] for each in (4.0, 2.0)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTheWay:
    """Bytes of every rank, shape (rows, ranks): of all buckets that have set out, `sent`; of one at the most when it
    does so, the gradients of the `head`, of a `layer` or of the `table` having made it whole; and of all at the most
    `after` the last backward, of those of a rank's last stage, which others may come after, `early`. 0 where gradients
    are summed as they are."""

    sent: FloatArray
    head: FloatArray
    layer: FloatArray
    table: FloatArray
    after: FloatArray
    early: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phases:
    """Bytes of buckets of so many elements, shape (rows, ranks): at the most when they set `out`, while they are
    `away`, at the most when they `turn`, until they land again, `back`, and at the most when they `land`."""

    out: FloatArray
    away: FloatArray
    turn: FloatArray
    back: FloatArray
    land: FloatArray

    def where(self, rows: BoolArray, other: _Phases) -> _Phases:
        """These in the rows told, and else the other ones."""
        names = [field.name for field in fields(self)]
        return _Phases(**{name: np.where(rows[:, None], getattr(self, name), getattr(other, name)) for name in names})

    @classmethod
    def steady(cls, held: FloatArray) -> _Phases:
        """As many all the time."""
        return cls(out=held, away=held, turn=held, back=held, land=held)


_Way = Callable[[FloatArray, FloatArray], _Phases]  # of so many elements, among so many ranks (rows, 1)


def on_the_way(extents: Sequence[Extent], optimized: Optimized, *, processor: bool) -> OnTheWay | None:
    """Of the gradients of blocks in `extents`, whose buckets come to their end one extent after the other; None where
    those of no row take anything."""
    found = []
    for extent in sorted(extents, key=lambda extent: _place(extent, optimized)):
        each = _of_extent(optimized.of_extent(extent.table, extent.counts), extent.held.owned, processor=processor)
        if each is not None:
            found.append(each)
    if not found:
        return None
    later, after = np.zeros_like(found[0].sent), np.zeros_like(found[0].sent)
    for each in reversed(found):
        after = np.maximum(after, each.after + later)
        later = later + each.sent
    most = {name: np.max([getattr(each, name) for each in found], axis=0) for name in ("head", "layer", "table")}
    return OnTheWay(sent=later, after=after, early=after, **most)


def _place(extent: Extent, optimized: Optimized) -> int:
    """Of its first block among the others."""
    return next(index for index, kind in enumerate(optimized.arrays.kinds) if kind.shards == extent.shards)


def _of_extent(found: Optimized, owned: FloatArray, *, processor: bool) -> OnTheWay | None:
    table = found.table
    sharded, replicas, inside = table.sharding > 0, replicas_meeting(table), table.divided
    first = np.where(sharded | (replicas > 1), replicas, inside)
    second = np.where(sharded | (replicas == 1), 1, inside)
    ways = list(_ways(found, owned, processor=processor))
    here = np.asarray(first > 1) & np.any([rows for rows, _ in ways], axis=0) if ways else np.zeros(len(table), bool)
    if not here.any():
        return None
    sizes = bucket_sizes(found, owned)

    def of(elements: FloatArray, ranks: FloatArray) -> _Phases:
        phases = _Phases.steady(np.zeros_like(elements))
        for rows, way in ways:
            phases = way(elements, ranks[:, None]).where(rows & here, phases)
        return phases

    after = _most_after(sizes, lambda elements: of(elements, first))
    others = of(sizes.all_, first).back - of(sizes.first, first).back
    again = of(sizes.first, second)
    again_most = np.max([again.out, again.turn, again.land], axis=0)
    after = np.where((second > 1)[:, None], np.maximum(after, others + again_most), after)
    # What is sharded has no bucket until then.
    copied = np.where(sharded & here, state_bytes(table).master, 0.0)[:, None]
    head, layer, table_ = (of(size, first).out + size * copied for size in (sizes.head, sizes.layer, sizes.table))
    sent = of(sizes.all_, first).away
    return OnTheWay(sent=sent, head=head, layer=layer, table=table_, after=after, early=after)


def _most_after(sizes: BucketSizes, of: Callable[[FloatArray], _Phases]) -> FloatArray:
    """While all buckets turn, and then land: the first one beside all others, or the largest as the last one."""
    all_, first, largest = of(sizes.all_), of(sizes.first), of(sizes.largest)
    turned = of(sizes.all_ - sizes.largest)
    return np.asarray(
        np.max(
            [
                all_.away - first.away + first.turn,
                turned.back + largest.turn,
                all_.back - first.back + first.land,
                largest.land,
            ],
            axis=0,
        )
    )


def _ways(found: Optimized, owned: FloatArray, *, processor: bool) -> Iterator[tuple[BoolArray, _Way]]:
    """Rows of every way in which some meet, and what buckets take that meet so."""
    table, sizes = found.table, state_bytes(found.table)
    wide, compressed = sizes.wide[:, None], np.zeros(len(table), dtype=np.bool_)
    for index, meeting in enumerate(table.syncs):
        rows = np.asarray(table.sync == index)
        if meeting.compression is not None and rows.any():
            compressed |= rows
            yield rows, _compressed(meeting.compression, found, owned, wide=wide)
    for place, precision in enumerate(PRECISIONS):
        rows = np.asarray(table.gradient_precision == place) & ~compressed
        if precision in PACKINGS and rows.any():
            yield rows, _rounded(place, wide=wide, processor=processor)
    cast = _is_cast(table) & ~compressed
    if cast.any():
        yield cast, lambda elements, _ranks: _Phases.steady(elements * sizes.reduced[:, None])


def _is_cast(table: PlanTable) -> BoolArray:
    """Rows whose buckets travel whole in another type: gradients of bf16 in fp32 unless the plan says less."""
    sizes = state_bytes(table)
    rounded = np.asarray([precision in PACKINGS for precision in PRECISIONS])[table.gradient_precision]
    wider = (table.master is Master.BF16_STOCHASTIC) & (sizes.reduced > sizes.master)
    return np.asarray((table.sharding == 0) & ~rounded & ((sizes.reduced < sizes.master) | wider))


def pieces(part: FloatArray, *, processor: bool) -> FloatArray:
    """Elements of a part that are rounded or read at once (`parallel.compress`)."""
    least = CACHED_ELEMENTS if processor else PIECE_ELEMENTS
    return np.minimum(part, np.maximum(least, part / PIECES))


def _rounded(precision: int, *, wide: FloatArray, processor: bool) -> _Way:
    """A byte of each element and of each sum; `precision` is an index into PRECISIONS."""
    written, read = _WRITTEN_BYTES[precision], READ_BYTES[precision]

    def of(elements: FloatArray, ranks: FloatArray) -> _Phases:
        part = elements / ranks
        piece = pieces(part, processor=processor)
        rounds, reads = piece * (wide + written), piece * (wide + read)
        back = part + elements
        return _Phases(
            out=elements + np.maximum(elements, rounds),
            away=2.0 * elements,
            turn=2.0 * elements + np.maximum(part * wide + np.maximum(reads, part + rounds), back),
            back=back,
            land=back + elements * wide + piece * read,
        )

    return of


def _compressed(compression: Compression, found: Optimized, owned: FloatArray, *, wide: FloatArray) -> _Way:
    match compression:
        case PowerSgd() | AcpSgd():
            return _in_factors(compression, found, owned, wide=wide)
        case TopK():
            return _largest(compression.share, wide=wide)
        case DeMo():
            return _transformed(compression, wide=wide)
        case OneBit():
            return _signs(wide=wide)


def _in_factors(compression: PowerSgd | AcpSgd, found: Optimized, owned: FloatArray, *, wide: FloatArray) -> _Way:
    """What is sent of the first factor and of what travels whole; PowerSGD has that factor made orthonormal too when
    it turns, ACP-SGD the other one from the beginning."""
    made = factored(compression, found, owned)
    left, right, whole = (
        wide * part / np.maximum(owned, 1.0) for part in (made.left, made.right, owned - made.matrices)
    )
    other = right if isinstance(compression, AcpSgd) else 0.0 * right
    again = 0.0 * left if isinstance(compression, AcpSgd) else left

    def of(elements: FloatArray, _ranks: FloatArray) -> _Phases:
        away = elements * (left + whole + other)
        back = away + elements * again
        return _Phases(out=away + elements * left, away=away, turn=back, back=back, land=back)

    return of


def _largest(share: float, *, wide: FloatArray) -> _Way:
    """Sizes of all elements, then those that are sent with their places, and everyone's."""

    def of(elements: FloatArray, ranks: FloatArray) -> _Phases:
        chosen = np.minimum(elements, np.ceil(share * elements))
        away = chosen * (wide + PLACE_BYTES) * (1.0 + ranks)
        found = _Phases.steady(away)
        out = np.maximum(elements * wide + chosen * (wide + _PLACE), away)
        return replace(found, out=out, land=away + chosen * _PLACE)

    return of


def _transformed(compression: DeMo, *, wide: FloatArray) -> _Way:
    """Coefficients, those of them that are sent and the elements that these stand for; everyone's coefficients, and
    their elements."""

    def of(elements: FloatArray, ranks: FloatArray) -> _Phases:
        chosen = np.ceil(elements / compression.chunk) * compression.largest
        away = chosen * (wide + CHUNK_PLACE_BYTES) * (1.0 + ranks)
        landing = chosen * (wide + CHUNK_PLACE_BYTES) * ranks + 2.0 * elements * wide
        out = 3.0 * elements * wide + chosen * (wide + _PLACE)
        return replace(_Phases.steady(away), out=out, land=landing)

    return of


def _signs(*, wide: FloatArray) -> _Way:
    """Signs, and twice the numbers that they stand for: before and after these have their sizes."""

    def of(elements: FloatArray, ranks: FloatArray) -> _Phases:
        away, back = 2.0 * _EIGHTH * elements, _EIGHTH * (elements + elements / ranks)
        numbers = 2.0 * elements * wide
        out = numbers + elements * (1.0 + _EIGHTH)
        return _Phases(out=out, away=away, turn=away + numbers, back=back, land=back + numbers)

    return of
