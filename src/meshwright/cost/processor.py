"""Processor sharing: what it costs that the ranks of a node run on the same cores. Accelerators share nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind, NodeGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the ranks of the busiest node share its cores; arrays of shape (rows,).

    `speed` of one rank alone relative to one core, on the cores it uses; `lockstep` >= 1 slows work that all tensor
    and data ranks of a stage do at once; `everyone` >= 1 slows work that every rank of the node does at once;
    `ranks` ranks of one stage and `stages` stages on a node; `cores` ranks can work at once (infinite for
    accelerators).
    """

    speed: FloatArray
    lockstep: FloatArray
    everyone: FloatArray
    ranks: FloatArray
    stages: FloatArray
    cores: FloatArray

    def least_seconds(self, *, each: FloatArray, microbatches: FloatArray, stages: FloatArray) -> FloatArray:
        """The least that a pipeline of `stages` ranks can take on its cores, `each` microbatch costing that in all.

        Cores that are never idle share the work, but while the pipeline fills and drains fewer ranks than cores have
        any. Zero for accelerators.
        """
        taken = np.minimum(self.ranks, self.cores) / self.cores
        steady = microbatches * each * self.stages / stages * taken
        idle = np.minimum(1.0 / np.maximum(taken, 1e-9), self.stages) - 1.0
        return np.where(np.isfinite(self.cores), steady + 0.5 * idle * each / stages, 0.0)


def share(group: NodeGroup, *, world: FloatArray, pipeline: FloatArray) -> Sharing:
    """The sharing on a node of `group` that `world` ranks, `pipeline` of them in a pipeline, are packed on.

    w ranks on c cores: each uses max(1, c // w) of them at the device's measured scaling, and what exceeds the cores
    waits its turn.
    """
    ones = np.ones_like(world)
    if group.device.kind is not DeviceKind.CPU or group.cores is None:
        return Sharing(speed=ones, lockstep=ones, everyone=ones, ranks=ones, stages=ones, cores=ones * np.inf)
    on_node = np.minimum(world, float(group.devices_per_node))
    cores = float(group.cores)
    threads = np.maximum(1.0, np.floor(cores / on_node))
    scaling = np.asarray(group.device.scaling, dtype=np.float64)
    speed = scaling[np.minimum(threads.astype(np.int64), len(scaling)) - 1]
    together = np.minimum(world / pipeline, on_node)
    return Sharing(
        speed=speed,
        lockstep=np.maximum(1.0, together * threads / cores),
        everyone=np.maximum(1.0, on_node * threads / cores),
        ranks=together,
        stages=on_node / together,
        cores=np.maximum(1.0, np.floor(cores / threads)),
    )
