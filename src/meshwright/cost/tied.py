"""The two copies of a tied table, on the first and the last pipeline rank, exchange their gradients once a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.lines import Linear
from meshwright.cost.software import Software
from meshwright.cost.states import StateBytes
from meshwright.cost.table import PlanTable
from meshwright.cost.vocabulary import table_elements
from meshwright.cost.work import FloatArray
from meshwright.spec.model import ModelSpec


def tied_seconds(
    table: PlanTable, ends: Sequence[Linear], *, sizes: StateBytes, model: ModelSpec, software: Software
) -> FloatArray:
    """Seconds after the last backward, shape (rows,), over the slowest of what the two `ends` of pipelines sum by.

    Nothing hides them: the first rank's copy has its gradient last. Each rank sends what it has of it after its data
    ranks have met, a shard where those divide it, and all of it where the software has a buffer of whole gradients.
    """
    if not model.head.tied:
        return np.zeros(len(table))
    apart = np.array([layout.ranks[0] != layout.ranks[-1] and 0 not in layout.frozen for layout in table.layouts])
    told = np.array([layout.policies[-1].shards if layout.policies else 0 for layout in table.layouts])[table.layout]
    shards = np.where(told > 0, told * table.context, table.divided)
    divided = np.where((table.sharding > 0) & (not software.keeps_copies), shards, 1.0)
    elements = table_elements(model.head, table) / divided
    sent = elements * (sizes.compute if software.adds_narrow else sizes.master)
    return np.where(apart[table.layout], np.max([each.seconds(sent) for each in ends], axis=0), 0.0)
