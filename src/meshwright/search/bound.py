"""Bounds that no plan can beat: seconds of a step by frame and by plan, and bytes on the fullest device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.cost import Layout, PlanTable
from meshwright.cost.block_bytes import AMOUNTS, FULL, BlockBytes
from meshwright.cost.evaluate import effective
from meshwright.cost.layouts import LayoutArrays, count
from meshwright.cost.links import lay_links
from meshwright.cost.memory import Peak, memory, what_memory_counts
from meshwright.cost.offload import away_seconds, optimizes_away
from meshwright.cost.optimizers import host_bytes
from meshwright.cost.optimizers import least_seconds as least_update_seconds
from meshwright.cost.parameters import owned_parameters
from meshwright.cost.pipeline import Shape
from meshwright.cost.placement import covers
from meshwright.cost.stacks import software_of
from meshwright.cost.states import experts_apart, state_bytes
from meshwright.cost.table import SCHEDULES
from meshwright.cost.tied import tied_seconds
from meshwright.cost.transfers import between_ranks, times_crossed
from meshwright.search.least import BlockLeast, Least
from meshwright.search.rooms import scarcity
from meshwright.search.round_trips import round_trips
from meshwright.search.space import Space
from meshwright.search.spread import Spread
from meshwright.search.travel import Lasts, Work, least_seconds
from meshwright.spec.cluster import ClusterSpec, DeviceKind, NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.plan import ScheduleKind

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_WORKING = ("working", "half", "ending", "giving", "given", "gathering", "mixing", "opening")
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


class Bounds:
    """Seconds that a step takes at the least, and bytes that a device holds.

    A pipeline rank does its own work on every microbatch, with the exchanges inside blocks and those of sharded
    parameters and gradients that the work cannot hide. Its microbatches come between the forward of one through the
    first stages of the ranks before it and, unless the schedule puts off part of it, its backward there. Its last
    gradients follow, those of a tied table, and the optimizer. Bytes are those of the ranks that mostly hold most.
    """

    def __init__(self, space: Space, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
        self._space = space
        self._model, self._cluster, self._job = model, cluster, job
        self._arrays = count((Layout((0, len(model.blocks)), (0,)),), model=model, every_rank=False)
        self._counted: tuple[Layout, ...] = ()
        self._every = self._arrays
        self._shown: tuple[Layout, ...] = ()
        self._before: Floats = np.zeros((1, 1, 1))
        self._fullest: Ids = np.zeros((1, 3), dtype=np.int64)
        self._number = self._arrays.everything[0, :-1]
        self._least = Least(space, kinds=self._arrays.kinds, model=model, cluster=cluster, job=job)
        self._spread = Spread(space, cluster=cluster)

    def frames(self) -> Floats:
        """Seconds of the best plan of every frame, whatever it chooses: the work on all blocks, divided among its ranks
        as their machines are fast."""
        each = (self._least.endless() @ self._number).T[self._least.setting]
        frames = self._space.frames
        local = self._job.batch_sequences // frames["data"]
        names = ("tensor", "sequence_parallel", "context", "pipeline")
        columns: dict[str, npt.ArrayLike] = {name: frames[name] for name in names}
        columns |= {"replicate": frames["data"], "microbatch": local, "precision": frames["precision"]}
        carried = self._carried(PlanTable.build(columns, layouts=()), np.ones(len(local)))
        work = self._spread.together(each, np.arange(len(local))) * local
        return np.asarray(np.maximum(work, carried))

    def shared(self, table: PlanTable, *, frames: Ids) -> Floats:
        """Seconds of every plan with the microbatches of `table`, whatever else it chooses, shape (rows,)."""
        ways = [self._found(table, frames, sharded, cut) for sharded, cut in product((False, True), self._least.cuts)]
        each = reduce(np.minimum, [self._least.passes_on_each(at) @ self._number for _, at in ways])
        work = self._spread.together(each.T, frames) * table.microbatches
        return np.asarray(np.maximum(work, self._carried(table, table.microbatches.astype(np.float64))))

    def scheduled(self, table: PlanTable, *, frames: Ids) -> Floats:
        """Seconds of every plan with the microbatches and the schedule of `table`, whatever is sharded over no more
        ranks than there."""
        forward, backward = self._either(table, frames)
        total = self._count(table).total.take(table.layout, axis=0)[..., :-1]
        before = self._entered(table, forward, backward)
        own = _summed(total, forward + backward)
        own = own if len(self._cluster.groups) == 1 else self._on_slowest(table, frames, total)
        work = (before + table.microbatches[:, None] * own).max(axis=1)
        return np.asarray(np.maximum(work, self._crossed(table, forward, backward)) + self._tied(effective(table)))

    def _on_slowest(self, table: PlanTable, frames: Ids, total: Floats) -> Floats:
        """Seconds of a microbatch's passes through the `total` blocks of every rank on the slowest of its machines,
        shape (rows, ranks), sharded or not."""
        ways = [self._found(table, frames, sharded, table.slices > 1) for sharded in (False, True)]
        each = reduce(np.minimum, [self._least.passes_on_each(at) for _, at in ways])
        here = covers(table, self._count(table).rank[table.layout], cluster=self._cluster)
        return np.asarray(
            np.max([np.where(here[..., index], _summed(total, own), 0.0) for index, own in enumerate(each)], axis=0)
        )

    def _either(self, table: PlanTable, frames: Ids) -> tuple[Floats, Floats]:
        """Seconds of blocks forward and backward, shape (rows, kinds), sharded or not."""
        found = []
        for sharded in (False, True):
            blocks, at = self._found(table, frames, sharded, table.slices > 1)
            found.append((blocks.forward.take(at, axis=0), blocks.backward.take(at, axis=0)))
        forward, backward = (reduce(np.minimum, values) for values in zip(*found, strict=True))
        return forward, backward

    def _found(self, table: PlanTable, frames: Ids, sharded: bool, cut: Mask | bool) -> tuple[BlockLeast, Ids]:
        """Blocks known, and which of them each row has where it is `sharded` or not and `cut` into slices or not."""
        every = np.ones(len(table), dtype=np.bool_)
        return self._least.of(table, frames=frames, sharded=every & sharded, cut=every & cut)

    def _entered(self, table: PlanTable, forward: Floats, backward: Floats) -> Floats:
        """Seconds before every rank's first work and after its last, of blocks of those seconds (rows, kinds)."""
        before = self._before[:, : _most_ranks(table)].take(table.layout, axis=0)
        passed = forward + np.where(np.isin(table.schedule, _WHOLE_BACKWARD)[:, None], backward, 0.0)
        return np.asarray(_summed(before, passed) / table.slices[:, None])

    def _added(self, table: PlanTable, parameters: Floats) -> Floats:
        """Of a slice's share of the `parameters` (rows, kinds) of blocks, those that backwards meet before every rank's
        first work and after its last."""
        whole = np.isin(table.schedule, _WHOLE_BACKWARD) / table.slices
        before = self._before[:, : _most_ranks(table)].take(table.layout, axis=0)
        return np.asarray(_summed(before, parameters) * whole[:, None])

    def seconds(self, table: PlanTable, *, frames: Ids) -> Floats:
        """Of every plan of `table`, each of the frame in `frames`, shape (rows,): of its first rank and its busiest.

        Rows side by side that differ only in the ranks that state is sharded over have one work.
        """
        table = effective(table)
        blocks, at = self._least.of(table, frames=frames, sharded=table.sharding > 0, cut=table.slices > 1)
        alike = np.stack([at, table.layout, table.schedule, table.slices, table.microbatches])
        starts = np.flatnonzero(np.append(True, (alike[:, 1:] != alike[:, :-1]).any(axis=0)))
        found = self._work(table.take(starts), blocks.take(at[starts]))
        work = found.take(np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(at)))))
        step = np.min([self._least_on(group, table, work) for group in self._cluster.groups], axis=0)
        if len(self._cluster.groups) > 1:
            step = np.maximum(step, self._where_they_lie(table, blocks.take(at), at))
        owned = owned_parameters(table, work.parameters[:, :1] + work.experts[:, :1], work.experts[:, :1])
        crossed = self._crossed(table, blocks.forward.take(at, axis=0), blocks.backward.take(at, axis=0))
        return np.asarray(np.maximum(step, crossed) + self._optimizer(table, owned) + self._tied(table))

    def _tied(self, table: PlanTable) -> Floats:
        """Seconds in which the ends of pipelines sum the gradients of a tied table, on the slowest machines that a row
        uses."""
        found, first = np.zeros(len(table)), 0
        rows = np.flatnonzero(table.pipeline > 1) if self._model.head.tied else np.zeros(0, dtype=np.int64)
        software = software_of(self._job, self._cluster)
        for group in self._cluster.groups if rows.size else ():
            some = table.take(rows)
            ends = lay_links(some, group=group, cluster=self._cluster, software=software).ends
            sizes = state_bytes(some, narrow=software.narrow_parameters)
            here = tied_seconds(some, [ends], sizes=sizes, model=self._model, software=software)
            found[rows] = np.maximum(found[rows], np.where(some.world > first, here, 0.0))
            first += group.num_devices
        return found

    def _least_on(self, group: NodeGroup, table: PlanTable, work: Work) -> Floats:
        """Seconds of `work` on the machines of `group`, shape (rows,)."""
        return least_seconds(
            table,
            work,
            contention=self._least.contention[group.name],
            group=group,
            cluster=self._cluster,
            software=software_of(self._job, self._cluster),
        )

    def _where_they_lie(self, table: PlanTable, blocks: BlockLeast, at: Ids) -> Floats:
        """Seconds of the busiest pipeline rank that has devices of a node group, on these, whichever takes longest;
        what is before it takes as long as on the quickest."""
        arrays = self._count(table)
        here = covers(table, arrays.rank[table.layout], cluster=self._cluster) & arrays.valid[table.layout][..., None]
        found = []
        for index, (group, own) in enumerate(zip(self._cluster.groups, self._least.on_each(at), strict=True)):
            held = here[..., index]
            work = self._work(table, blocks, own=own, among=held)
            seconds = self._least_on(group, table, work)
            found.append(np.where(held.any(axis=1), seconds, 0.0))
        return np.asarray(np.max(found, axis=0))

    def _crossed(self, table: PlanTable, forward: Floats, backward: Floats) -> Floats:
        """Seconds that plans take at the least to pass microbatches on between sites, with their schedules and chunks
        and blocks of those seconds (rows, kinds): as `_carried`, beside one microbatch's own forward, and as
        `round_trips` where no rank waits for what it sends."""
        if len(self._cluster.sites) == 1:
            return np.zeros(len(table))
        microbatches, chunks = (values.astype(np.float64) for values in (table.microbatches, table.chunks))
        times = times_crossed(table.schedule, microbatches=microbatches, chunks=chunks)
        once = np.where((table.pipeline > 1) & (table.chunks == 1), forward @ self._number, 0.0)
        carried = self._carried(table, times) + once
        if software_of(self._job, self._cluster).waits_for_transfers:
            return carried
        if table.layouts != self._shown:
            self._every, self._shown = count(table.layouts, model=self._model, every_rank=True), table.layouts
        arrays = self._every.first_ranks(_most_ranks(table))
        reach = [way for way, _ in self._ways(table, arrays.rank[table.layout])]
        around = round_trips(table, arrays=arrays, forward=forward, backward=backward, reach=reach)
        return np.maximum(carried, around)

    def _carried(self, table: PlanTable, times: Floats) -> Floats:
        """Seconds for which microbatches, crossing it so many `times`, keep the slowest link between pipeline ranks
        busy, shape (rows,). Told where sites are apart: other links are seldom what a step waits for."""
        if len(self._cluster.sites) == 1:
            return np.zeros(len(table))
        busy = [carried for _, carried in self._ways(table, table.pipeline[:, None] - 1)]
        return np.asarray(times * np.min(busy, axis=0))

    def _ways(self, table: PlanTable, rank: Ids) -> list[tuple[Floats, Floats]]:
        """Seconds of a microbatch to every `rank` (rows, ranks), and for how long it keeps a link busy, on every kind
        of machines."""
        return [
            between_ranks(
                table,
                rank,
                group=group,
                cluster=self._cluster,
                model=self._model,
                job=self._job,
                software=software_of(self._job, self._cluster),
            )
            for group in self._cluster.groups
        ]

    def _work(
        self,
        table: PlanTable,
        blocks: BlockLeast,
        *,
        own: BlockLeast | None = None,
        among: npt.NDArray[np.bool_] | None = None,
    ) -> Work:
        """What `blocks` make of the first rank of every row and of that which is longest busy, with what is before;
        with `among` of this one alone, which is one of those, and whose `own` blocks they are."""
        every = self._count(table).total.take(table.layout, axis=0)[..., :-1]
        entered = self._entered(table, blocks.forward, blocks.backward)
        busy = self._entered(table, blocks.forward, blocks.backward_work)
        blocks = own or blocks
        path = entered + table.microbatches[:, None] * _summed(every, blocks.forward + blocks.backward)
        path = path if among is None else np.where(among, path, -1.0)
        busiest = path.argmax(axis=1)[:, None]
        ranks = np.concatenate([0 * busiest, busiest], axis=1) if among is None else busiest
        total = np.take_along_axis(every, ranks[..., None], axis=1)
        apart = np.where(table.on_grid[:, None], blocks.apart, 0.0)

        def lasts(way: str) -> Lasts:
            busy = {name: _summed(total, getattr(blocks, f"{way}_{name}")) for name in ("work", "near", "far")}
            return Lasts(whole=_summed(total, getattr(blocks, way)), **busy)

        return Work(
            before=np.take_along_axis(entered, ranks, axis=1),
            busy_before=np.take_along_axis(busy, ranks, axis=1),
            parameters_before=np.take_along_axis(self._added(table, blocks.parameters), ranks, axis=1),
            forward=lasts("forward"),
            backward=lasts("backward"),
            parameters=_summed(total, blocks.parameters - apart),
            experts=_summed(total, apart),
        )

    def _optimizer(self, table: PlanTable, owned: Floats) -> Floats:
        """Seconds of the optimizer over the `owned` parameters (rows, 1) of one rank, on the quickest machines."""
        found = []
        for group in self._cluster.groups:
            here = least_update_seconds(owned, spec=self._job.optimizer, device=group.device)
            here = np.zeros_like(here) if group.device.kind is DeviceKind.CPU else here
            away = optimizes_away(table)
            if away.any():
                passed = host_bytes(self._job.optimizer, software_of(self._job, self._cluster))
                here = np.where(
                    away[:, None],
                    away_seconds(owned, table, sizes=state_bytes(table), group=group, passed=passed),
                    here,
                )
            found.append(here[:, 0])
        return np.asarray(np.min(found, axis=0))

    def bytes(self, table: PlanTable, *, frames: Ids, ranks: int = 3, scarce: bool = False) -> Floats:
        """Of every plan of `table`, each of the frame in `frames`, shape (rows,): what so many of its ranks hold.

        They are the first of those with most parameters in layers, the first rank and the last. Infinite where their
        host has no room for what is offloaded. `scarce` counts what ranks with less room than the largest device hold
        for as many times as much (`scarcity`).
        """
        table = effective(table)
        blocks, at = self._least.of(table, frames=frames, sharded=table.sharding > 0, cut=table.slices > 1)
        arrays, layout = self._count(table), table.layout[:, None]
        ends = self._fullest[table.layout, :ranks]
        names = ("total", "first", "last", "first_upto", "last_upto")
        counts = {name: getattr(arrays, name)[layout, ends] for name in names}
        shape = Shape(
            schedule=table.schedule,
            pipeline=table.pipeline.astype(np.float64),
            chunks=table.chunks.astype(np.float64),
            microbatches=table.microbatches.astype(np.float64),
            rank=arrays.rank[layout, ends],
            valid=np.ones(ends.shape, dtype=np.bool_),
            slices=table.slices.astype(np.float64),
        )
        times = scarcity(table, shape.rank, cluster=self._cluster) if scarce else 1.0
        found, known = [], dict[object, Peak]()
        for group in self._cluster.groups:
            counted = what_memory_counts(group, self._job)
            known[counted] = known.get(counted) or memory(
                table,
                _as_blocks(blocks, at, table),
                arrays=arrays,
                counts=counts,
                shape=shape,
                model=self._model,
                group=group,
                job=self._job,
                software=software_of(self._job, self._cluster),
                least=True,
            )
            peak = known[counted].on(group, table, valid=shape.valid)
            held = (times * np.sum(list(peak.parts.values()), axis=0)).max(axis=1)
            found.append(np.where((peak.host > peak.host_room).any(axis=1), np.inf, held))
        return np.asarray(np.min(found, axis=0))

    def _count(self, table: PlanTable) -> LayoutArrays:
        if table.layouts != self._counted:
            mixed = len(self._cluster.groups) > 1
            self._arrays = count(table.layouts, model=self._model, every_rank=mixed)
            self._counted = table.layouts
            self._before = (self._arrays.first_upto - self._arrays.first)[..., :-1]
            kinds = [kind.block for kind in self._arrays.kinds]
            layers = [float(block.parameters) if isinstance(block, Layer) else 0.0 for block in kinds]
            last = self._arrays.valid.sum(axis=1) - 1
            largest = (self._arrays.total[..., :-1] @ layers).argmax(axis=1)
            self._fullest = np.stack([largest, 0 * last, last], axis=1)
        return self._arrays.first_ranks(_most_ranks(table))


def _most_ranks(table: PlanTable) -> int:
    return int(table.pipeline.max(initial=1))


def _summed(counts: Floats, each: Floats) -> Floats:
    """Sums over kinds of counts (rows, ranks, kinds) times values (rows, kinds)."""
    return np.asarray(np.matmul(counts, each[..., None])[..., 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    bytes: BlockBytes
    parameters: Floats
    expert_parameters: Floats


def _as_blocks(found: BlockLeast, rows: Ids, table: PlanTable) -> list[_Held]:
    """As memory reads them: bytes and parameters of the chosen rows, kind by kind. They were told as though no rank
    had a part of an expert, so that copies of whole ones are among them."""
    kinds, nothing = found.kept.shape[1], np.zeros((len(rows), found.kept.shape[1]))
    columns: dict[str, Any] = dict.fromkeys((*AMOUNTS, "parameters", "apart"), nothing)
    for name in columns:
        values = getattr(found, name)
        if values.any():
            columns[name] = values.take(rows, axis=0)
    if columns["cast"].any():
        divided = ~experts_apart(table)[:, None]
        again = (table.recompute == FULL)[:, None]
        for names, those in ((("kept",), divided & ~again), (_WORKING, divided & again)):
            for name in names:
                columns[name] = np.where(those, columns[name] - columns["cast"], columns[name])
    return [
        _Held(
            parameters=columns["parameters"][:, kind],
            expert_parameters=columns["apart"][:, kind],
            bytes=BlockBytes(**{name: columns[name][:, kind] for name in AMOUNTS}),
        )
        for kind in range(kinds)
    ]
