"""Bounds that no plan can beat: seconds of a step by frame and by plan, and bytes on the fullest device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from meshwright.cost import Layout, PlanTable
from meshwright.cost.layouts import Kind
from meshwright.cost.machine import machine
from meshwright.cost.network import collective
from meshwright.cost.placement import ring
from meshwright.cost.software import software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import OFFLOADS, RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.schedule.build import V_SHAPES
from meshwright.search.rules import divisors
from meshwright.search.space import Space
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Block, Head, Layer, Mixture, ModelSpec
from meshwright.spec.plan import AxisName, Offload, ScheduleKind, Sharding

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
MOMENTS = 2.0
_DIVIDES = ("tensor", "sequence_parallel", "context", "inner", "exchange", "expert", "expert_tensor")
_TRAVELS = ("tensor", "context", "shard", "replicate", "pipeline", "sharding", "precision", "gradient_precision")
_ZERO2, _ZERO3 = SHARDINGS.index(Sharding.GRADIENTS), SHARDINGS.index(Sharding.PARAMETERS)
_AWAY, _KEPT_AWAY = OFFLOADS.index(Offload.OPTIMIZER), OFFLOADS.index(Offload.ACTIVATIONS)
_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_HEAD_ON_FIRST = [SCHEDULES.index(kind) for kind in V_SHAPES]
_SEQUENCE_1F1B = SCHEDULES.index(ScheduleKind.SEQUENCE_1F1B)
_FORWARDS_FIRST = [SCHEDULES.index(kind) for kind in (ScheduleKind.GPIPE, ScheduleKind.BREADTH_FIRST)]
_WHOLE_BACKWARD = [
    SCHEDULES.index(kind)
    for kind in (
        ScheduleKind.GPIPE,
        ScheduleKind.ONE_F_ONE_B,
        ScheduleKind.INTERLEAVED,
        ScheduleKind.BREADTH_FIRST,
        ScheduleKind.SEQUENCE_1F1B,
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Least:
    """Of one microbatch: seconds of all blocks, of a layer, of its forward and of the head, bytes that a layer keeps,
    and a layer's parameters on one device."""

    seconds: Floats
    layer: Floats
    forward: Floats
    head: Floats
    kept: Floats
    parameters: Floats


class Bounds:
    """Seconds that a step takes at the least, and bytes that a device holds.

    The busiest pipeline rank has at least an equal share of the work on all blocks, with the exchanges inside them, of
    every microbatch, on the fastest devices of the cluster. A rank's microbatches come between the forward of one
    through the first stages of the ranks before it and, unless the schedule puts off part of it, its backward there.
    Nor is a microbatch done before its sharded parameters and gradients have travelled. The first pipeline rank holds
    the states of its layers at the end of a step, and before that what they keep of all microbatches under way.
    """

    def __init__(self, space: Space, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
        codes = np.stack([space.frames[name] for name in _DIVIDES], axis=1)
        settings, which = np.unique(codes, axis=0, return_inverse=True)
        self._space = space
        self._batch = job.batch_sequences
        self._sizes = np.array(divisors(job.batch_sequences))
        self._setting = which.reshape(-1)
        self._cluster = cluster
        mixed = sum(layer.transform.parameters for layer in model.layers if isinstance(layer.transform, Mixture))
        towers = sum(tower.parameters for tower in model.towers)
        self._dense = float(model.parameters - mixed - towers)
        self._known: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._least = _least(settings, self._sizes, space=space, model=model, cluster=cluster, job=job)

    def frames(self) -> Floats:
        """Of the best plan of every frame, whatever it chooses."""
        local = self._batch // self._space.frames["data"]
        pairs, pair = np.unique(np.stack([self._setting, local], axis=1), axis=0, return_inverse=True)
        each = self._least.seconds[..., 0] / self._sizes
        divides = pairs[:, 1][:, None] % self._sizes[None, :] == 0
        best = np.where(divides, each[pairs[:, 0]], np.inf).min(axis=1)
        return np.asarray(best[pair.reshape(-1)] * local / self._space.frames["pipeline"])

    def seconds(self, table: PlanTable, *, frames: Ids) -> Floats:
        """Of every plan of `table`, each of the frame in `frames`, shape (rows,)."""
        at = self._at(table, frames)
        layer, head, forward = self._least.layer[at], self._least.head[at], self._least.forward[at]
        work = self._least.seconds[at]
        before, own = (values[table.layout] for values in self._paths(table))
        entered = np.where(np.isin(table.schedule, _WHOLE_BACKWARD), layer, forward)
        path: Floats = before * (entered / table.slices)[:, None] + table.microbatches[:, None] * own * layer[:, None]
        headed = np.where(np.isin(table.schedule, _HEAD_ON_FIRST), 0.0, head)
        last = path[:, 0] + table.microbatches * headed
        worked = np.maximum(work * table.microbatches / table.pipeline, np.maximum(last, path.max(axis=1)))
        times = np.where(table.schedule == _BREADTH_FIRST, 1, table.microbatches)
        return np.asarray(np.maximum(worked, times * self._travelled(table)))

    def _travelled(self, table: PlanTable) -> Floats:
        """Seconds that a microbatch's sharded parameters and gradients of an average rank travel, shape (rows,)."""
        columns = [getattr(table, name) for name in _TRAVELS]
        key = np.zeros(len(table), dtype=np.int64)
        for column in columns:
            distinct, codes = np.unique(column, return_inverse=True)
            key = key * len(distinct) + codes.reshape(-1)
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        some = table.take(first)
        sizes, moved = state_bytes(some), self._dense / (some.tensor * some.pipeline)
        found = []
        for group in self._cluster.groups:
            around = ring(some, (AxisName.SHARD, AxisName.CONTEXT), group=group, cluster=self._cluster)
            gather, scatter = (
                collective(operation, around, group=group, cluster=self._cluster)
                for operation in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
            )
            seconds = np.where(some.sharding == _ZERO3, 2.0 * gather.seconds(moved * sizes.compute), 0.0)
            seconds = seconds + np.where(some.sharding >= _ZERO2, scatter.seconds(moved * sizes.reduced), 0.0)
            found.append(np.where(group.device.kind is DeviceKind.CPU, 0.0, seconds))
        return np.asarray(np.min(found, axis=0)[inverse.reshape(-1)])

    def _paths(self, table: PlanTable) -> tuple[Floats, Floats]:
        """By layout, of the last rank and of those with most layers: layers passed before it, and its own."""
        for layout in table.layouts[len(self._known) :]:
            self._known.append(_path(layout))
        values = np.array(self._known)
        return values[:, 0], values[:, 1]

    def bytes(self, table: PlanTable, *, frames: Ids) -> Floats:
        """Of every plan of `table`, each of the frame in `frames`, shape (rows,)."""
        at = self._at(table, frames)
        layers = _first_layers(table)[table.layout]
        sizes = state_bytes(table)
        parameters = layers * self._least.parameters[at]
        owned = parameters / np.where(table.sharding > 0, np.maximum(table.divided, table.expert_divided), 1)
        moments = np.where(table.offload == _AWAY, 0.0, MOMENTS * sizes.master)
        states = owned * (sizes.compute + moments)
        all_of = np.isin(table.schedule, _FORWARDS_FIRST)
        under_way = np.where(all_of, table.microbatches, np.minimum(table.pipeline, table.microbatches))
        under_way = np.where(table.schedule == _SEQUENCE_1F1B, 1, under_way)
        kept = np.where(table.offload == _KEPT_AWAY, 0.0, layers * self._least.kept[at] * under_way)
        return np.asarray(states + kept)

    def _at(self, table: PlanTable, frames: Ids) -> tuple[Ids, Ids, Ids]:
        return self._setting[frames], np.searchsorted(self._sizes, table.microbatch), table.recompute


def _path(layout: Layout) -> tuple[tuple[int, int], tuple[int, int]]:
    """(layers passed before, own layers) as ((last, fullest), (last, fullest)) ranks."""
    bounds = np.asarray(layout.bounds)
    held = np.diff(bounds)
    held[0] -= 1
    held[-1] -= 1
    own = np.bincount(np.asarray(layout.ranks), weights=held, minlength=layout.pipeline).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(held[: layout.pipeline])[:-1]])
    fullest = int(np.flatnonzero(own == own.max())[-1])
    return (int(before[-1]), int(before[fullest])), (int(own[-1]), int(own[fullest]))


def _first_layers(table: PlanTable) -> Ids:
    """Layers of the first pipeline rank by layout: the embedding is not one, nor is the head."""
    found = []
    for layout in table.layouts:
        held = sum(layout.bounds[s + 1] - layout.bounds[s] for s, rank in enumerate(layout.ranks) if rank == 0)
        found.append(max(held - 1 - (layout.ranks[-1] == 0), 0))
    return np.array(found, dtype=np.int64)


def _least(settings: Ids, sizes: Ids, *, space: Space, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> _Least:
    """By setting, microbatch and recompute.

    The least of all groups of machines, and of nothing sharded and all sharded over more ranks than there are: the
    one adds up whole gradients and casts whole weights, the other may cost the host some time.
    """
    shape = (len(settings), len(sizes), len(RECOMPUTES))
    setting, size, recompute = (array.reshape(-1) for array in np.indices(shape))
    columns: dict[str, npt.ArrayLike] = {name: settings[setting, index] for index, name in enumerate(_DIVIDES)}
    inside = np.maximum(np.asarray(columns["expert"]) * np.asarray(columns["expert_tensor"]), 1)
    stage = np.asarray(columns["tensor"]) * np.asarray(columns["context"])
    columns |= {
        "microbatch": sizes[size],
        "recompute": recompute,
        "precision": space.precision,
        "replicate": np.lcm(stage, inside) // stage,
    }
    layouts = (Layout((0, len(model.blocks)), (0,)),)
    sharded = {"shard": cluster.num_devices, "sharding": SHARDINGS.index(Sharding.PARAMETERS)}
    tables = [PlanTable.build(columns, layouts=layouts), PlanTable.build(columns | sharded, layouts=layouts)]
    counts: dict[Block, int] = {}
    for block in model.blocks:
        counts[block] = counts.get(block, 0) + 1
    features = software(job.software)
    found: dict[str, list[Floats]] = {
        name: [] for name in ("seconds", "layer", "forward", "head", "kept", "parameters")
    }
    for group, table in product(cluster.groups, tables):
        kinds = [Kind(block=block) for block in counts]
        prices = machine(group, table, kinds, cluster=cluster, job=job, software=features)
        own = [(b.whole_forward + b.whole_backward) / prices.sharing.lockstep for b in prices.blocks]
        layers = [index for index, kind in enumerate(kinds) if isinstance(kind.block, Layer)]
        heads = [work for kind, work in zip(kinds, own, strict=True) if isinstance(kind.block, Head)]
        found["seconds"].append(np.sum([work * n for work, n in zip(own, counts.values(), strict=True)], axis=0))
        found["layer"].append(np.min([own[index] for index in layers], axis=0))
        passed = [prices.blocks[index].whole_forward / prices.sharing.lockstep for index in layers]
        found["forward"].append(np.min(passed, axis=0))
        found["head"].append(heads[0])
        found["kept"].append(np.min([prices.blocks[index].bytes.kept for index in layers], axis=0))
        found["parameters"].append(np.min([prices.blocks[index].parameters for index in layers], axis=0))
    return _Least(**{name: np.asarray(np.min(values, axis=0)).reshape(shape) for name, values in found.items()})


def least_bytes(space: Space, *, model: ModelSpec) -> Floats:
    """Bytes that the fullest device of every plan of each frame holds, shape (frames,).

    An equal share of the parameters, in the precision that multiplies, and of the moments unless they may be in the
    host's memory, divided over all ranks of a stage.
    """
    sizes = state_bytes(PlanTable.build({"precision": space.precision}, layouts=(Layout((0, 1), (0,)),)))
    may_leave = any((entry.columns["offload"] == _AWAY).any() for entry in space.inner.values())
    each = float(sizes.compute[0]) + (0.0 if may_leave else MOMENTS * float(sizes.master[0]))
    frames = space.frames
    ranks = frames["tensor"] * frames["context"] * frames["data"] * frames["pipeline"]
    return np.asarray(model.parameters / ranks * each, dtype=np.float64)
