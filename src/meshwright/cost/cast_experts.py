"""Copies of experts that one rank has whole, where others have theirs gathered: every forward casts its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.cost.block_bytes import FULL, Holds, recomputes
from meshwright.cost.holding import Held
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.parameters import grid_parameters
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.states import ZERO1, ZERO2, States, state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray


def cast_experts(
    table: PlanTable,
    blocks: Sequence[Holds],
    state: States,
    peak: Mapping[str, FloatArray],
    entry: Held,
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
) -> tuple[FloatArray, FloatArray]:
    """Bytes at the `peak`, shape (rows, ranks): of one microbatch, which are told among what is gathered, and of the
    others that a rank keeps something of then, but of blocks that are computed again."""
    alone = ((table.sharding == ZERO1) | (table.sharding == ZERO2)) & (table.expert_divided == 1)

    def copies(total: FloatArray) -> FloatArray:
        here = grid_parameters(table, blocks, counts={"total": total}) * state_bytes(table).compute[:, None]
        return np.where(alone[:, None], here, 0.0)

    one = copies(counts["total"]) * (1.0 - peak["freed"] / np.maximum(state.gathered, 1.0))
    others = np.maximum(_in_flight(peak, entry, counts, shape=shape) - 1.0, 0.0)
    return np.minimum(one, state.gathered), others * copies(_kept(table, arrays=arrays, counts=counts))


def _in_flight(
    peak: Mapping[str, FloatArray], entry: Held, counts: Mapping[str, FloatArray], *, shape: Shape
) -> FloatArray:
    """Microbatches of which a rank keeps something at the peak, of each of its stages on average."""
    stages = {name: counts[name][..., -1] for name in ("first", "last", "total")}
    most = held(shape, **stages) / np.maximum(stages["total"], 1.0)
    return np.minimum(most, peak["activations"] / np.maximum(entry.all_stages.one_kept, 1.0))


def _kept(table: PlanTable, *, arrays: LayoutArrays, counts: Mapping[str, FloatArray]) -> FloatArray:
    """The blocks of a rank that are not computed again as a whole, (rows, ranks, kinds + 1)."""
    found = counts["total"].copy()
    for index, kind in enumerate(arrays.kinds):
        found[recomputes(kind, table, FULL), :, index] = 0.0
    return found
