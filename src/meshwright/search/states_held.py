"""What parameters and optimizer state hold at the least: of whole frames, and of plans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.cost import Layout, PlanTable
from meshwright.cost.offload import keeps_parameters_away, optimizes_away
from meshwright.cost.optimizers import least_state
from meshwright.cost.states import state_bytes
from meshwright.cost.table import OFFLOADS, SHARDINGS
from meshwright.search.space import Space
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Offload, Sharding

Floats = npt.NDArray[np.float64]
ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
_AWAY = OFFLOADS.index(Offload.OPTIMIZER)
_ALL_AWAY = OFFLOADS.index(Offload.PARAMETERS)


def least_bytes(space: Space, *, model: ModelSpec, job: JobSpec) -> Floats:
    """Bytes that the fullest device of every plan of each frame holds, shape (frames,).

    An equal share of the parameters, in the precision that multiplies, and of the moments unless they may be in the
    host's memory, divided over all ranks of a stage.
    """
    sizes = state_bytes(PlanTable.build({"precision": space.frames["precision"]}, layouts=(Layout((0, 1), (0,)),)))
    if _ALL_AWAY in space.values("offload"):
        return np.zeros(len(space.frames["precision"]))
    leaves = _AWAY in space.values("offload")
    each = sizes.compute + (0.0 if leaves else least_state(job.optimizer, wide=sizes.wide))
    frames = space.frames
    ranks = frames["tensor"] * frames["context"] * frames["data"] * frames["pipeline"]
    return np.asarray(model.parameters / ranks * each, dtype=np.float64)


def least_states(table: PlanTable, *, model: ModelSpec, job: JobSpec) -> Floats:
    """Bytes of parameters and optimizer state that the fullest pipeline rank of every row holds at the least.

    The fullest pipeline rank holds at least an equal share of the parameters. Each is kept once in the precision
    that multiplies and as the moments that the optimizer has, divided over as many ranks as the sharding allows.
    """
    sizes = state_bytes(table)
    inside = np.maximum(table.tensor, table.expert * table.expert_tensor)
    share = model.parameters / (inside * table.pipeline)
    over = table.world / (inside * table.pipeline)
    kept = np.where(keeps_parameters_away(table), 0.0, sizes.compute)
    parameters = kept / np.where(table.sharding >= ZERO3, over, 1.0)
    here = ~optimizes_away(table)
    moments = np.where(
        here, least_state(job.optimizer, wide=sizes.wide) / np.where(table.sharding >= ZERO1, over, 1.0), 0.0
    )
    return np.asarray(share * (parameters + moments), dtype=np.float64)
