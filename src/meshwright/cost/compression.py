"""What compressed gradients cost: bytes on their way, bytes that stay, and the work of making them small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.coding import CODINGS
from meshwright.cost.optimizers import Optimized, Treated
from meshwright.cost.overlap import Contention, Slack, Traffic
from meshwright.cost.overlap import exposed as exposed_beside
from meshwright.cost.states import BUCKET_BYTES, state_bytes
from meshwright.cost.synchronize import DataLinks, compresses
from meshwright.cost.table import PRECISIONS, SHARDINGS, BoolArray, IntArray, PlanTable
from meshwright.cost.traffic_compression import CHUNK_PLACE_BYTES, PLACE_BYTES
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind, DeviceSpec, Precision
from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.plan import Sharding
from meshwright.spec.synchronize import SCALE_BYTES

# Bytes that making an element small and back moves in fp32, as parallel/ does it: what is owed is added to and read for
# every factor, what was sent is taken off it, and the product is written. Largest elements are found in some passes, as
# largest coefficients are, besides the passes of their transforms; signs are taken, gathered into bytes and looked up
# again, at both ends of both collectives.
_FACTORED, _ALTERNATED, _CHOSEN, _TRANSFORMED, _SIGNED = 32.0, 28.0, 52.0, 76.0, 96.0
# On a processor, whose searches and look-ups are slower than its memory, these take as long as they do (docs/lab.md).
_PROCESSOR_CHOSEN, _PROCESSOR_TRANSFORMED, _PROCESSOR_SIGNED = 320.0, 320.0, 300.0
# Operations on an element by each column of its factors: products for both factors, what is left, and the product.
_PRODUCTS, _ALTERNATE_PRODUCTS = 8.0, 6.0
_TRANSFORMS = 6.0  # on an element by each of its chunk: there, back to what is left, and back from everyone's
# Kernels that a matrix starts: products and sums, and those that make factors orthonormal.
_MATRIX_KERNELS, _ALTERNATE_KERNELS, _BUCKET_KERNELS = 60.0, 34.0, 20.0
_NONE, _ZERO1 = SHARDINGS.index(Sharding.NONE), SHARDINGS.index(Sharding.OPTIMIZER)
_ROUNDED, _PROCESSOR_ROUNDED = (
    np.asarray([getattr(CODINGS[kind], name) if kind in CODINGS else 0.0 for kind in PRECISIONS])
    for name in ("bytes", "processor_bytes")
)
# Of the work of rounding, where sums stay with their owners and are not sent; assumed, not measured.
_SCATTERED = 0.6
_GATHERED = 0.5  # of an all-reduce of as many bytes, which passes them around twice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Of one kind of compression on every rank, shape (rows, ranks): bytes of the tensors that its collectives have
    summed, during backward and after it; bytes that `stay`, that work `moves`, operations and kernels."""

    beside: FloatArray
    after: FloatArray
    stay: FloatArray
    moves: FloatArray
    flops: FloatArray
    kernels: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSeconds:
    """Of rows whose gradients are compressed: seconds exposed and in all, shape (rows, ranks)."""

    rows: BoolArray
    exposed: FloatArray
    whole: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Trained parameters that ranks have `owned`, shape (rows, ranks), of rows and blocks as `found` has them, whose
    gradients meet over `links`: among replicas alone where they are sharded."""

    found: Optimized
    owned: FloatArray
    links: DataLinks


def compressed_seconds(
    meetings: Sequence[Compressed], *, slack: Slack, contention: Contention | None, device: DeviceSpec
) -> CompressedSeconds | None:
    """How long gradients take to meet, those of each of `meetings` apart; None where no row compresses.

    What is sent first travels during backward, all but its last bucket; what follows it, and all work, is waited for.
    """
    rows = compresses(meetings[0].found.table)
    if not rows.any():
        return None
    nothing = np.zeros_like(meetings[0].owned)
    traffic, tail, waited = Traffic.none(nothing), nothing, nothing
    for meeting in meetings:
        for mine, compression in _kinds(meeting.found.table):
            sent, last, late = _seconds(meeting, compression, device=device)
            traffic = traffic + sent.where(mine[:, None])
            tail = np.where(mine[:, None], np.maximum(tail, last), tail)
            waited = waited + np.where(mine[:, None], late, 0.0)
    hidden = np.maximum(exposed_beside(traffic, slack, contention), tail)
    return CompressedSeconds(rows=rows, exposed=hidden + waited, whole=traffic.whole + waited)


def _seconds(
    meeting: Compressed, compression: Compression, *, device: DeviceSpec
) -> tuple[Traffic, FloatArray, FloatArray]:
    """What travels during backward, how long its last bucket does, and seconds of what follows and of all work."""
    found, owned, links = meeting.found, meeting.owned, meeting.links
    bandwidth = device.memory_bandwidth * device.memory_fraction
    peak = device.peak_flops.get(Precision.FP32) or min(device.peak_flops.values())
    sharded = found.table.sharding[:, None] > 0
    sizes = _sizes(compression, found, owned, processor=device.kind is DeviceKind.CPU)
    calls = np.ceil(owned * state_bytes(found.table).wide[:, None] / BUCKET_BYTES)
    beside, after = (
        np.where(sharded, *(each.seconds(sent, calls=calls) for each in (links.reduce_replicas, links.reduce_all)))
        for sent in (sizes.beside, sizes.after)
    )
    after = np.where(sizes.after > 0.0, after, 0.0)
    if isinstance(compression, TopK | DeMo):
        beside = _GATHERED * beside
    elif isinstance(compression, OneBit):
        beside, after = _GATHERED * beside, _GATHERED * after
    work = sizes.moves / bandwidth + sizes.flops / peak + sizes.kernels * device.launch_seconds
    shards, wholes = (Traffic.over(beside, way, num_bytes=sizes.beside) for way in (links.replicas, links.everywhere))
    return shards.where(sharded) + wholes.where(~sharded), beside / np.maximum(calls, 1.0), after + work


def coding_seconds(table: PlanTable, trained: FloatArray, *, device: DeviceSpec) -> FloatArray:
    """What a step spends on rounding gradients of `trained` parameters, shape (rows, ranks): 0 where none is."""
    moved = (_PROCESSOR_ROUNDED if device.kind is DeviceKind.CPU else _ROUNDED)[table.gradient_precision]
    replicated = table.sharding == _NONE
    times = np.where(replicated | (table.sharding == _ZERO1), 1.0, table.microbatches)
    each = np.where(table.meeting * table.context > 1, moved * times * np.where(replicated, 1.0, _SCATTERED), 0.0)
    return np.asarray(trained * each[:, None] / (device.memory_bandwidth * device.memory_fraction))


def compression_bytes(found: Optimized, owned: FloatArray) -> FloatArray:
    """Bytes of what is left of the gradients of `owned` parameters and of factors that stay from step to step, shape
    (rows, ranks)."""
    kept = np.zeros_like(owned)
    for mine, compression in _kinds(found.table):
        kept = np.where(mine[:, None], _sizes(compression, found, owned, processor=False).stay, kept)
    return kept


def _peers(table: PlanTable) -> IntArray:
    """Ranks that have the same parameters and meet in every step, shape (rows,)."""
    return np.where(table.sharding > 0, table.replicate, table.meeting * table.context)


def _kinds(table: PlanTable) -> Iterator[tuple[BoolArray, Compression]]:
    """Rows of every kind of compression that some have whose ranks meet."""
    for index, meeting in enumerate(table.syncs):
        if meeting.compression is not None:
            rows = (table.sync == index) & (_peers(table) > 1)
            if rows.any():
                yield rows, meeting.compression


def _sizes(compression: Compression, found: Optimized, owned: FloatArray, *, processor: bool) -> _Sizes:
    wide = state_bytes(found.table).wide[:, None]
    ranks = _peers(found.table).astype(np.float64)[:, None]
    nothing = np.zeros_like(owned)
    buckets = np.ceil(owned * wide / BUCKET_BYTES)
    match compression:
        case PowerSgd() | AcpSgd():
            return _in_factors(compression, found, owned, wide=wide)
        case TopK():
            moved = (_PROCESSOR_CHOSEN if processor else _CHOSEN) / 4.0
            sent = np.ceil(compression.share * owned) * (wide + PLACE_BYTES) * ranks
            return _Sizes(
                beside=sent,
                after=nothing,
                stay=owned * wide,
                moves=owned * moved * wide + sent,
                flops=nothing,
                kernels=buckets * (_BUCKET_KERNELS + 4.0 * ranks),
            )
        case DeMo():
            moved = (_PROCESSOR_TRANSFORMED if processor else _TRANSFORMED) / 4.0
            number = np.ceil(owned / compression.chunk) * compression.largest
            sent = number * (wide + CHUNK_PLACE_BYTES) * ranks
            return _Sizes(
                beside=sent,
                after=nothing,
                stay=owned * wide,
                moves=owned * moved * wide + sent,
                flops=_TRANSFORMS * compression.chunk * owned,
                kernels=buckets * (_BUCKET_KERNELS + 4.0 * ranks),
            )
        case OneBit():
            moved = (_PROCESSOR_SIGNED if processor else _SIGNED) / 4.0
            part = np.ceil(owned / ranks)
            sent = ranks * (np.ceil(part / 8.0) + SCALE_BYTES * buckets)
            return _Sizes(
                beside=sent,
                after=sent,
                stay=(owned + part) * wide,
                moves=owned * moved * wide,
                flops=nothing,
                kernels=buckets * 2.0 * _BUCKET_KERNELS,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """Elements of a rank's matrices that factors make smaller, of their `left` and `right` factors, and how many
    matrices there are; shape (rows, ranks)."""

    matrices: FloatArray
    left: FloatArray
    right: FloatArray
    number: FloatArray


def factored(compression: PowerSgd | AcpSgd, found: Optimized, owned: FloatArray) -> Factored:
    """Of `owned` parameters of every rank."""
    rank = float(compression.rank)

    def of(count: Callable[[FloatArray, FloatArray, FloatArray], FloatArray]) -> FloatArray:
        """The sum over matrices of `count` of how many lie in a tensor, their rows and their columns."""

        def each(entry: Treated) -> FloatArray:
            if len(entry.tensor.shape) < 2:
                return np.zeros(len(found.table))
            lengths = [size / entry.cuts.get(dim, np.asarray(1.0)) for dim, size in enumerate(entry.tensor.shape)]
            rows, columns = lengths[-2:]
            stack = np.prod([np.ones(len(found.table)), *lengths[:-2]], axis=0)
            pays = rank * (rows + columns) < rows * columns
            return np.where(pays, count(stack, rows, columns), 0.0)

        table = found.of_table
        return found.everywhere(each) + found.rest(owned) * (each(table) / table.local)[:, None]

    return Factored(
        matrices=of(lambda stack, rows, columns: stack * rows * columns),
        left=of(lambda stack, rows, _columns: rank * stack * rows),
        right=of(lambda stack, _rows, columns: rank * stack * columns),
        number=of(lambda _stack, rows, _columns: np.ones_like(rows)),
    )


def _in_factors(compression: PowerSgd | AcpSgd, found: Optimized, owned: FloatArray, *, wide: FloatArray) -> _Sizes:
    """Factors of every matrix that they make smaller; the rest travels whole."""
    rank, made = float(compression.rank), factored(compression, found, owned)
    whole = (owned - made.matrices) * wide
    if isinstance(compression, AcpSgd):
        mean = (made.left + made.right) / 2.0
        return _Sizes(
            beside=whole + mean * wide,
            after=np.zeros_like(owned),
            stay=(made.matrices + made.left + made.right) * wide,
            moves=made.matrices * _ALTERNATED / 4.0 * wide,
            flops=(_ALTERNATE_PRODUCTS * made.matrices + 4.0 * rank * mean) * rank,
            kernels=made.number * _ALTERNATE_KERNELS,
        )
    return _Sizes(
        beside=whole + made.left * wide,
        after=made.right * wide,
        stay=(made.matrices + made.right) * wide,
        moves=made.matrices * _FACTORED / 4.0 * wide,
        flops=(_PRODUCTS * made.matrices + 4.0 * rank * (made.left + made.right)) * rank,
        kernels=made.number * _MATRIX_KERNELS,
    )
