"""A legal and an illegal design for every rule of compressed gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.spec.cluster import Precision
from meshwright.spec.compression import AcpSgd, OneBit, PowerSgd, TopK
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync
from tests.search.search_samples import design


@dataclass(frozen=True)
class Case:
    legal: Callable[[], Design]
    illegal: Callable[[], Design]
    says: str


def met(replicate: int = 2, shard: int = 1, **fields: object) -> Design:
    """Replicas, or shards, that meet as `fields` of GradientSync say."""
    sharding = Sharding.NONE if shard == 1 else Sharding.PARAMETERS
    rest = 4 // (replicate * shard)
    made = design(replicate=replicate, shard=shard, sharding=sharding, tensor=rest, microbatch=rest)
    return replace(made, plan=replace(made.plan, gradients=GradientSync(**fields)))


COMPRESSION_CASES = {
    "compression-is-sound": Case(
        lambda: met(compression=PowerSgd(rank=1)),
        lambda: met(compression=TopK(share=1.5)),
        "a share of 1.5 of a gradient",
    ),
    "compression-has-peers": Case(
        lambda: met(compression=OneBit()),
        lambda: met(compression=AcpSgd(), precision=Precision.INT8),
        "acpsgd of gradients that meet in int8",
    ),
    "compression-is-laid": Case(
        lambda: met(shard=2, compression=AcpSgd(rank=2)),
        lambda: met(replicate=1, shard=2, compression=AcpSgd(rank=2)),
        "acpsgd of gradients that zero3 shards among all ranks is not known here",
    ),
}
