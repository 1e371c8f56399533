"""How replicas of the plans of a space may meet: in every step, or as learners that hold all that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.search.product import Product
from meshwright.spec.job import JobSpec
from meshwright.spec.synchronize import SyncKind

Ids = npt.NDArray[np.int64]
SYNC_KINDS = tuple(SyncKind)
EVERY_STEP = SYNC_KINDS.index(SyncKind.EVERY_STEP)


def shards_of_grid(product: Product) -> Ids:
    """Ranks of the shard axis, or a divisor of them, that a learner needs to hold a whole grid of experts."""
    holders = np.maximum(product["expert"] * product["expert_tensor"], 1)
    return np.asarray(holders // np.gcd(holders, product["tensor"] * product["context"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What frames have in common that may choose alike: `shards` of a learner's grid of experts, `meetings` ways in
    which replicas may meet."""

    pipeline: int
    data: int
    context: bool
    shards: int
    meetings: Sequence[int]

    @classmethod
    def of(cls, product: Product, row: int, *, meetings: Sequence[int]) -> Key:
        return cls(
            pipeline=int(product["pipeline"][row]),
            data=int(product["data"][row]),
            context=bool(product["context"][row] > 1),
            shards=int(shards_of_grid(product)[row]) if meetings != [EVERY_STEP] else 1,
            meetings=meetings,
        )


def choose_meetings(product: Product, key: Key, job: JobSpec) -> None:
    """How replicas meet; those that meet in every step come last, for they hold least."""
    if list(key.meetings) == [EVERY_STEP]:
        product.times(["sync", "every"], [[EVERY_STEP, 0]])
        return
    ways = sorted({EVERY_STEP, *key.meetings}, reverse=True)
    product.times(["sync"], [[way] for way in ways])
    product.columns["every"] = np.where(product["sync"] != EVERY_STEP, job.synchronize.every, 0)
    apart = (product["replicate"] > 1) & (product["shard"] % key.shards == 0)
    product.keep(apart | (product["sync"] == EVERY_STEP))
    product.constrain("sync", product["sync"], [kind.value for kind in SYNC_KINDS])
