"""How replicas of the plans of a space may meet: in every step, whole or compressed, or as learners that hold all that
they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost.table import SHARDINGS
from meshwright.search.product import Product
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Sharding
from meshwright.spec.synchronize import MEETINGS, SyncKind

Ids = npt.NDArray[np.int64]
EVERY_STEP = MEETINGS.index(SyncKind.EVERY_STEP)
_UNSHARDED = SHARDINGS.index(Sharding.NONE)
COMPRESSED = len(SyncKind)  # the first of MEETINGS whose gradients are compressed


def meeting_words(word: str, *, whole: str) -> str:
    """One of MEETINGS as it is told; `whole` is how gradients that meet in every step are."""
    if word == SyncKind.EVERY_STEP:
        return whole
    compressed = MEETINGS.index(word) >= COMPRESSED
    return f"gradients that meet by {word}" if compressed else f"learners that meet as {word}"


def shards_of_grid(product: Product) -> Ids:
    """Ranks of the shard axis, or a divisor of them, that a learner needs to hold a whole grid of experts."""
    holders = np.maximum(product["expert"] * product["expert_tensor"], 1)
    return np.asarray(holders // np.gcd(holders, product["tensor"] * product["context"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What frames have in common that may choose alike: whether experts have a `grid` and the `shards` of a learner's,
    `meetings` ways in which replicas may meet."""

    pipeline: int
    data: int
    context: bool
    grid: bool
    shards: int
    meetings: Sequence[int]

    @classmethod
    def of(cls, product: Product, row: int, *, meetings: Sequence[int]) -> Key:
        return cls(
            pipeline=int(product["pipeline"][row]),
            data=int(product["data"][row]),
            context=bool(product["context"][row] > 1),
            grid=bool(product["expert"][row] > 0),
            shards=int(shards_of_grid(product)[row]) if meetings != [EVERY_STEP] else 1,
            meetings=meetings,
        )


def choose_meetings(product: Product, key: Key, job: JobSpec) -> None:
    """How replicas meet; those that meet in every step, and whole, come last, for they hold least."""
    if list(key.meetings) == [EVERY_STEP]:
        product.times(["sync", "every"], [[EVERY_STEP, 0]])
        return
    ways = sorted({EVERY_STEP, *key.meetings}, reverse=True)
    product.times(["sync"], [[way] for way in ways])
    way = product["sync"]
    learners, compressed = (way != EVERY_STEP) & (way < COMPRESSED), way >= COMPRESSED
    product.columns["every"] = np.where(learners, job.synchronize.every, 0)
    least = max(2, job.synchronize.quorum + (job.synchronize.grace_seconds > 0.0))
    apart = (product["replicate"] >= least) & (product["shard"] % key.shards == 0)
    whole = product["sharding"] == _UNSHARDED
    one_axis = np.where(whole, (product["data"] > 1) != key.context, product["replicate"] > 1)
    product.keep(np.where(learners, apart, ~compressed | (one_axis & (not key.grid))))
    product.constrain("sync", product["sync"], MEETINGS)
