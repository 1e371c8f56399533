"""Collectives of one bucket of compressed gradients, with their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK, factors, kept
from meshwright.spec.synchronize import SCALE_BYTES

PLACE_BYTES = 4.0  # of an element that is sent alone
CHUNK_PLACE_BYTES = 1.0  # of a coefficient of a chunk


def of_bucket(
    compression: Compression, shapes: Sequence[tuple[int, ...]], *, ranks: int, wide: float
) -> Iterator[tuple[str, float]]:
    """(operation, bytes of its whole tensor) of tensors of `shapes`, `wide` bytes an element, that lie one after
    another; of ACP-SGD in even steps."""
    elements = sum(math.prod(shape) for shape in shapes)
    match compression:
        case PowerSgd() | AcpSgd():
            found = [(shape, factors(shape, rank=compression.rank)) for shape in shapes]
            whole = sum(math.prod(shape) for shape, each in found if each is None)
            yield "all_reduce", wide * (whole + sum(each.left for _, each in found if each is not None))
            if isinstance(compression, PowerSgd):
                yield "all_reduce", wide * sum(each.right for _, each in found if each is not None)
        case TopK():
            yield "all_gather", ranks * kept(elements, share=compression.share) * (wide + PLACE_BYTES)
        case DeMo():
            sent = math.ceil(elements / compression.chunk) * compression.largest
            yield "all_gather", ranks * sent * (wide + CHUNK_PLACE_BYTES)
        case OneBit():
            for operation in ("all_to_all", "all_gather"):
                yield operation, ranks * (math.ceil(math.ceil(elements / ranks) / 8) + SCALE_BYTES)
