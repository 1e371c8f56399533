"""Blocks of plans by over how many data parallel ranks they are sharded, those of the shard axis or a number of their
own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.parameters import Shared, local_parameters, owned_of, shared_of
from meshwright.cost.states import replicas_meeting
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The blocks that so many `shards` divide, None those of the shard axis: the `table` as though all were sharded so,
    `counts` of these alone, and `held` of their parameters, shape (rows, ranks)."""

    shards: int | None
    table: PlanTable
    counts: Mapping[str, FloatArray]
    held: Shared

    @property
    def repeated(self) -> FloatArray:
        """What of them a rank owns that others who meet with it in every step own too."""
        return np.where((replicas_meeting(self.table) > 1)[:, None], self.held.owned, 0.0)


def by_extent(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> list[Extent]:
    """Of `blocks` those over every number, each once."""
    first = {kind.shards: kind for kind in reversed(arrays.kinds)}
    if set(first) == {None}:
        whole = local_parameters(table, blocks, arrays=arrays, counts=counts, model=model)
        owned = owned_of(table, blocks, arrays=arrays, counts=counts, model=model)
        return [Extent(shards=None, table=table, counts=counts, held=Shared(whole=whole, owned=owned))]
    found = []
    for shards, kind in first.items():
        ones = np.ones(len(table))
        those = [ones * (other.shards == shards) for other in arrays.kinds]
        held = shared_of(table, blocks, those, arrays=arrays, counts=counts, model=model)
        own = {name: values * np.stack([*those, ones], axis=1)[:, None, :] for name, values in counts.items()}
        found.append(Extent(shards=shards, table=kind.rows(table), counts=own, held=held))
    return found
