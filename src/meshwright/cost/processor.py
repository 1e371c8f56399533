"""Processor sharing: what it costs that the ranks of a node run on the same cores. Accelerators share nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind, NodeGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the ranks of the busiest node share its cores; arrays of shape (rows,).

    `speed` of one rank alone relative to one core, on the `threads` cores it uses; `lockstep` >= 1 slows work that
    all tensor and data ranks of a stage do at once, `everyone` >= 1 work that every rank of the node does at once;
    `ranks` ranks of one stage and `stages` stages are on a node. `together` is the node's speed by busy cores, empty
    for accelerators.
    """

    speed: FloatArray
    threads: FloatArray
    lockstep: FloatArray
    everyone: FloatArray
    ranks: FloatArray
    stages: FloatArray
    together: tuple[float, ...] = ()

    def slowdown(self, ranks: FloatArray) -> FloatArray:
        """How much longer work takes when `ranks` ranks of a node do it at once, at least 1."""
        return _slowdown(ranks, threads=self.threads, speed=self.speed, together=self.together)

    def least_seconds(self, *, each: FloatArray, microbatches: FloatArray, stages: FloatArray) -> FloatArray:
        """The least that a pipeline of `stages` ranks can take on its cores, `each` microbatch costing that in all.

        Cores that are never idle share the work, but while the pipeline fills and drains fewer ranks than cores have
        any. Zero for accelerators.
        """
        if not self.together:
            return np.zeros_like(each)
        whole = self.ranks * self.stages * self.speed / self.everyone
        taken = np.minimum(self.ranks * self.speed / self.lockstep / whole, 1.0)
        steady = microbatches * each * self.stages / stages * taken
        idle = np.minimum(1.0 / taken, self.stages) - 1.0
        return steady + 0.5 * idle * each / stages


def share(group: NodeGroup, *, world: FloatArray, pipeline: FloatArray) -> Sharing:
    """The sharing on a node of `group` that `world` ranks, `pipeline` of them in a pipeline, are packed on.

    w ranks on c cores: each uses max(1, c // w) of them at the device's measured scaling; k busy cores add up to the
    group's measured `together`, and what exceeds them waits its turn.
    """
    ones = np.ones_like(world)
    if group.device.kind is not DeviceKind.CPU or group.cores is None:
        return Sharing(speed=ones, threads=ones, lockstep=ones, everyone=ones, ranks=ones, stages=ones)
    on_node = np.minimum(world, float(group.devices_per_node))
    threads = np.maximum(1.0, np.floor(group.cores / on_node))
    scaling = np.asarray(group.device.scaling, dtype=np.float64)
    speed = scaling[np.minimum(threads.astype(np.int64), len(scaling)) - 1]
    together = group.together or tuple(float(count) for count in range(1, group.cores + 1))
    stage = np.minimum(world / pipeline, on_node)
    return Sharing(
        speed=speed,
        threads=threads,
        lockstep=_slowdown(stage, threads=threads, speed=speed, together=together),
        everyone=_slowdown(on_node, threads=threads, speed=speed, together=together),
        ranks=stage,
        stages=on_node / stage,
        together=together,
    )


def _slowdown(ranks: FloatArray, *, threads: FloatArray, speed: FloatArray, together: tuple[float, ...]) -> FloatArray:
    if not together:
        return np.ones_like(ranks)
    busy = ranks * threads
    known = np.arange(1, len(together) + 1)
    return np.maximum(1.0, ranks * speed / np.interp(busy, known, together))
