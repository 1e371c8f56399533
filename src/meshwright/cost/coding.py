"""What it takes to round numbers before they travel and to read them again: as bytes of memory that takes as long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.spec.cluster import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Bytes of memory in whose time one element goes to its owner and its sum comes back, rounded at both ends.

    Those of an accelerator are counted: what is owed is added to, looked through, rounded and written again, of what is
    sent and of the sum, and both are read. A processor's are measured, for it does more to an element in its caches
    (docs/lab.md).
    """

    bytes: float
    processor_bytes: float


CODINGS: Mapping[Precision, Coding] = MappingProxyType(
    {
        Precision.FP8: Coding(bytes=48.0, processor_bytes=136.0),
        Precision.INT8: Coding(bytes=48.0, processor_bytes=80.0),
        Precision.INT4: Coding(bytes=48.0, processor_bytes=120.0),
    }
)
