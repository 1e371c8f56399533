"""The two copies of a tied table, on the first and the last pipeline rank, exchange their gradients once a step."""

from __future__ import annotations

import numpy as np

from meshwright.cost.network import Linear
from meshwright.cost.states import StateBytes
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import ModelSpec


def tied_seconds(
    table: PlanTable, model: ModelSpec, *, ends: Linear, sizes: StateBytes, keeps_whole: bool
) -> FloatArray:
    """Seconds after the last backward, shape (rows,), over `ends`, the way between those two ranks.

    Nothing hides them: the first rank's copy has its gradient last. Each rank sends what it has of it after its data
    ranks have met, a shard where those divide it, and all where the software `keeps_whole` gradients.
    """
    if not model.head.tied:
        return np.zeros(len(table))
    apart = np.array([layout.ranks[0] != layout.ranks[-1] and 0 not in layout.frozen for layout in table.layouts])
    divided = np.where((table.sharding > 0) & (not keeps_whole), table.divided, 1.0)
    sent = model.head.matrix_parameters / table.tensor / divided * sizes.master
    return np.where(apart[table.layout], ends.seconds(sent), 0.0)
