"""PlanTable: candidate plans as a struct of arrays, one row a plan; what `evaluate` prices in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.cost.layout import Layout, Policy
from meshwright.cost.meeting import USUAL_MEETINGS, Meeting
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.job import JobSpec
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Dispatch,
    ExpertGrid,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
    TensorGrid,
    Training,
)
from meshwright.spec.synchronize import GradientSync

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SHARDINGS = tuple(Sharding)
RECOMPUTES = tuple(Recompute)
SCHEDULES = tuple(ScheduleKind)
_APART = ("layouts", "orders", "syncs", "master")  # fields that hold for all rows
PRECISIONS = tuple(Precision)
OFFLOADS = tuple(Offload)
EXCHANGES = tuple(ExchangeKind)
TOKEN_LAYOUTS = tuple(TokenLayout)
DISPATCHES = tuple(Dispatch)
TENSOR_GRIDS = tuple(TensorGrid)
DEFAULT_ORDER = (AxisName.PIPELINE, AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT, AxisName.TENSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Candidate plans, one a row; every column has shape (rows,).

    `sharding`, `recompute`, `schedule`, `precision` and `gradient_precision` are indexes into SHARDINGS (0 none, 1
    zero1, 2 zero2, 3 zero3), RECOMPUTES (0 none, 1 selective, 2 full), SCHEDULES and PRECISIONS; `offload` and
    `exchange` into OFFLOADS and EXCHANGES, `token_layout` into TOKEN_LAYOUTS, `dispatch` of an expert grid into
    DISPATCHES, `tensor_grid` into TENSOR_GRIDS. `layout` indexes `layouts` and `order` indexes `orders`, the mesh axes
    from the outermost to the innermost. `sync` indexes `syncs`, and `every` is how many steps a round of learners has:
    0 the fewest that hide the network, which `evaluate` finds. `microbatch` is in sequences; `microbatches` counts them
    per data rank and step. `expert` 0 is a plan without an expert grid, whose experts lie as the tensor axis divides
    them; `expert_tensor` is then 0 too. `master` is what the job keeps parameters in, and no choice of a plan.
    """

    tensor: IntArray
    sequence_parallel: BoolArray
    pipeline: IntArray
    chunks: IntArray
    replicate: IntArray
    shard: IntArray
    context: IntArray
    inner: IntArray
    exchange: IntArray
    token_layout: IntArray
    expert: IntArray
    expert_tensor: IntArray
    dispatch: IntArray
    tensor_grid: IntArray
    sharding: IntArray
    microbatch: IntArray
    microbatches: IntArray
    slices: IntArray
    recompute: IntArray
    offload: IntArray
    schedule: IntArray
    precision: IntArray
    gradient_precision: IntArray
    sync: IntArray
    every: IntArray
    layout: IntArray
    order: IntArray
    layouts: tuple[Layout, ...]
    orders: tuple[tuple[AxisName, ...], ...] = (DEFAULT_ORDER,)
    syncs: tuple[Meeting, ...] = USUAL_MEETINGS
    master: Master = Master.FP32

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def data(self) -> IntArray:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def learners(self) -> IntArray:
        """Replicas that train apart and meet in rounds, as Plan.learners."""
        return np.where(self.of_learners, self.replicate, 1) if self.has_learners else np.ones_like(self.replicate)

    @property
    def of_learners(self) -> BoolArray:
        """Rows whose replicas are learners, of which there may be one."""
        return np.array([met.kind.has_learners for met in self.syncs])[self.sync]

    @property
    def meeting(self) -> IntArray:
        """Data parallel ranks that meet in every step: those of one learner."""
        return self.data // self.learners if self.has_learners else self.data

    @property
    def has_learners(self) -> bool:
        """Whether some row may have learners: of `syncs`, those at 0 meet in every step."""
        return bool(self.sync.any() and self.of_learners.any())

    @property
    def side(self) -> IntArray:
        """Tensor ranks that divide the features of one token: all of a line, those along a side of a square or cube."""
        dims = np.array([grid.dims for grid in TENSOR_GRIDS])[self.tensor_grid]
        return np.where(dims == 1, self.tensor, np.rint(self.tensor ** (1.0 / dims)).astype(np.int64))

    @property
    def residual_parts(self) -> IntArray:
        """Tensor ranks that divide the residual stream between layers, by tokens or features."""
        return np.where(self.sequence_parallel | (self.tensor_grid > 0), self.tensor, 1)

    @property
    def divided(self) -> IntArray:
        """Ranks over which sharded state is divided: those of the shard and the context axis."""
        return self.shard * self.context

    @property
    def on_grid(self) -> BoolArray:
        """Rows with a grid of experts."""
        return self.expert > 0

    @property
    def expert_divided(self) -> IntArray:
        """Ranks over which sharded state of experts is divided."""
        holders = np.maximum(self.expert * self.expert_tensor, 1)
        return np.where(self.on_grid, np.maximum(self.divided * self.tensor // holders, 1), self.divided)

    @property
    def expert_replicas(self) -> IntArray:
        """Ranks that hold the same part of the same experts and meet in every step."""
        ranks = self.world // (self.pipeline * self.learners)
        held = np.maximum(self.expert * self.expert_tensor * self.expert_divided, 1)
        return np.where(self.on_grid, np.maximum(ranks // held, 1), self.replicate // self.learners)

    @property
    def world(self) -> IntArray:
        return self.tensor * self.context * self.pipeline * self.replicate * self.shard

    @classmethod
    def build(
        cls,
        columns: Mapping[str, npt.ArrayLike],
        *,
        layouts: Sequence[Layout],
        orders: Sequence[tuple[AxisName, ...]] = (DEFAULT_ORDER,),
        syncs: Sequence[Meeting] = USUAL_MEETINGS,
    ) -> PlanTable:
        """A table from columns by name, broadcast to one length.

        Columns left out take these values: no parallelism, no sharding, no recompute, 1f1b, one microbatch of one
        sequence, bf16 with fp32 gradients that meet in every step, layout 0, order 0.
        """
        defaults: dict[str, int] = {
            "sequence_parallel": 0,
            "exchange": 0,
            "token_layout": TOKEN_LAYOUTS.index(TokenLayout.ZIGZAG),
            "expert": 0,
            "expert_tensor": 0,
            "dispatch": 0,
            "tensor_grid": 0,
            "sharding": 0,
            "recompute": 0,
            "offload": 0,
            "schedule": SCHEDULES.index(ScheduleKind.ONE_F_ONE_B),
            "precision": PRECISIONS.index(Precision.BF16),
            "gradient_precision": PRECISIONS.index(Precision.FP32),
            "sync": 0,
            "every": 0,
            "layout": 0,
            "order": 0,
        }
        names = column_names()
        unknown = sorted(set(columns) - set(names))
        assert not unknown, f"not columns of the plan table: {unknown}"
        arrays = np.broadcast_arrays(*(np.atleast_1d(columns.get(name, defaults.get(name, 1))) for name in names))
        typed: dict[str, Any] = {
            name: array.astype(np.bool_ if name == "sequence_parallel" else np.int64, copy=False)
            for name, array in zip(names, arrays, strict=True)
        }
        return cls(**typed, layouts=tuple(layouts), orders=tuple(orders), syncs=tuple(syncs))

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanTable:
        """The one-row table of `plan`; raises ConfigError when its block groups differ in what no layout can say."""
        groups = plan.groups
        if len({(group.tensor, group.sequence_parallel, group.precision) for group in groups}) > 1:
            what = "block groups of this plan differ from each other, and this cost model prices one setting"
            why = "tensor, sequence_parallel and precision are one value a plan here"
            fix = "give every group the same settings"
            raise ConfigError(Problem(what=what, where="plan.stages", why=why, fix=fix))
        group = plan.first_group
        bounds = (*(stage.start for stage in plan.stages), plan.stages[-1].stop)
        layout = Layout(
            bounds=bounds,
            ranks=tuple(stage.rank for stage in plan.stages),
            policies=_policies(groups),
            frozen=plan.frozen_blocks,
            table=plan.schedule.table,
            paths=plan.schedule.paths,
        )
        named = tuple(axis.name for axis in plan.axes)
        usual = named == tuple(name for name in DEFAULT_ORDER if name in named)
        order = DEFAULT_ORDER if usual else (*named, *(name for name in DEFAULT_ORDER if name not in named))
        columns = {
            "tensor": plan.tensor,
            "sequence_parallel": group.sequence_parallel,
            "pipeline": plan.pipeline,
            "chunks": plan.schedule.chunks,
            "replicate": plan.replicate,
            "shard": plan.shard,
            "context": plan.context,
            "inner": plan.exchange.inner,
            "exchange": EXCHANGES.index(plan.exchange.kind),
            "token_layout": TOKEN_LAYOUTS.index(plan.exchange.layout),
            "expert": plan.experts.expert if plan.experts else 0,
            "expert_tensor": plan.experts.tensor if plan.experts else 0,
            "dispatch": DISPATCHES.index(plan.experts.dispatch) if plan.experts else 0,
            "tensor_grid": TENSOR_GRIDS.index(plan.tensor_grid),
            "sharding": SHARDINGS.index(group.sharding),
            "microbatch": plan.microbatch,
            "microbatches": plan.schedule.microbatches,
            "slices": plan.schedule.slices,
            "recompute": RECOMPUTES.index(group.recompute),
            "offload": OFFLOADS.index(group.offload),
            "schedule": SCHEDULES.index(plan.schedule.kind),
            "precision": PRECISIONS.index(group.precision),
            "gradient_precision": PRECISIONS.index(plan.gradients.precision),
            "sync": int(plan.gradients != GradientSync(precision=plan.gradients.precision)),
            "every": plan.gradients.rounds.every if plan.gradients.kind.has_learners else 0,
        }
        met = plan.gradients
        syncs = (Meeting(), Meeting(kind=met.kind, rounds=met.rounds, compression=met.compression))
        return cls.build(columns, layouts=(layout,), orders=(order,), syncs=syncs)

    def to_plan(self, row: int, *, model: str, cluster: str, sequence_length: int) -> Plan:
        """The Plan that row `row` stands for; from_plan of it gives the row back. Rounds have a step at the least."""
        sizes = {
            AxisName.PIPELINE: int(self.pipeline[row]),
            AxisName.REPLICATE: int(self.replicate[row]),
            AxisName.SHARD: int(self.shard[row]),
            AxisName.CONTEXT: int(self.context[row]),
            AxisName.TENSOR: int(self.tensor[row]),
        }
        layout = self.layouts[int(self.layout[row])]
        stages = tuple(
            Stage(rank=rank, groups=self._groups(row, layout, layout.bounds[index], layout.bounds[index + 1]))
            for index, rank in enumerate(layout.ranks)
        )
        grid = ExpertGrid(
            expert=int(self.expert[row]),
            tensor=int(self.expert_tensor[row]),
            dispatch=DISPATCHES[int(self.dispatch[row])],
        )
        return Plan(
            model=model,
            cluster=cluster,
            axes=tuple(
                Axis(name=name, size=sizes[name])
                for name in self.orders[int(self.order[row])]
                if name is not AxisName.CONTEXT or sizes[name] > 1
            ),
            stages=stages,
            schedule=self.entry(row),
            sequence_length=sequence_length,
            microbatch=int(self.microbatch[row]),
            gradients=self.syncs[int(self.sync[row])].gradients(
                every=int(self.every[row]),
                learners=int(self.replicate[row]),
                precision=PRECISIONS[int(self.gradient_precision[row])],
            ),
            exchange=Exchange(
                kind=EXCHANGES[int(self.exchange[row])],
                inner=int(self.inner[row]),
                layout=TOKEN_LAYOUTS[int(self.token_layout[row])],
            ),
            experts=grid if grid.expert else None,
            tensor_grid=TENSOR_GRIDS[int(self.tensor_grid[row])],
        )

    def entry(self, row: int) -> Schedule:
        """The schedule of row `row`."""
        layout = self.layouts[int(self.layout[row])]
        return Schedule(
            kind=SCHEDULES[int(self.schedule[row])],
            microbatches=int(self.microbatches[row]),
            chunks=int(self.chunks[row]),
            slices=int(self.slices[row]),
            table=layout.table,
            paths=layout.paths,
        )

    def _groups(self, row: int, layout: Layout, start: int, stop: int) -> tuple[BlockGroup, ...]:
        """The blocks of a stage, cut where their policy changes or training begins or ends."""

        def treatment(block: int) -> tuple[Policy | None, bool]:
            return layout.policies[block] if layout.policies else None, block in layout.frozen

        found = []
        for (policy, frozen), places in groupby(range(start, stop), key=treatment):
            held = tuple(places)
            group = self._group(row, held[0], held[-1] + 1)
            if policy is not None:
                group = policy.given(group)
            found.append(replace(group, training=Training.FROZEN) if frozen else group)
        return tuple(found)

    def _group(self, row: int, start: int, stop: int) -> BlockGroup:
        return BlockGroup(
            start=start,
            stop=stop,
            tensor=int(self.tensor[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            sharding=SHARDINGS[int(self.sharding[row])],
            recompute=RECOMPUTES[int(self.recompute[row])],
            offload=OFFLOADS[int(self.offload[row])],
            precision=PRECISIONS[int(self.precision[row])],
        )

    @classmethod
    def joined(cls, tables: Sequence[PlanTable]) -> PlanTable:
        """The rows of all tables, whose layouts are the first of the last table's, and ways of meeting one list."""
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(table, name) for table in tables]) for name in column_names()
        }
        orders = tuple(dict.fromkeys(order for table in tables for order in table.orders))
        places = [np.array([orders.index(order) for order in table.orders]) for table in tables]
        columns["order"] = np.concatenate([place[table.order] for place, table in zip(places, tables, strict=True)])
        return replace(tables[-1], **columns, orders=orders)

    @classmethod
    def stacked(cls, tables: Sequence[PlanTable]) -> PlanTable:
        """The rows of all tables in order, each with its own layouts, orders and ways of meeting."""
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(table, name) for table in tables]) for name in column_names()
        }
        for name, held in (("layout", "layouts"), ("order", "orders"), ("sync", "syncs")):
            starts = np.cumsum([0, *(len(getattr(table, held)) for table in tables)])
            columns[name] = columns[name] + np.repeat(starts[:-1], [len(table) for table in tables])
            columns[held] = tuple(entry for table in tables for entry in getattr(table, held))
        return cls(**columns, master=tables[-1].master)

    def with_used_layouts(self) -> PlanTable:
        """The same rows, their layouts without those that no row has."""
        used, layout = np.unique(self.layout, return_inverse=True)
        if len(used) == len(self.layouts):
            return self
        return replace(self, layout=layout.reshape(-1), layouts=tuple(self.layouts[int(index)] for index in used))

    def take(self, rows: npt.ArrayLike | slice) -> PlanTable:
        """The table of the chosen rows: indexes, a mask or a slice."""
        chosen = rows if isinstance(rows, slice) else np.asarray(rows)
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in column_names()}
        return PlanTable(**columns, layouts=self.layouts, orders=self.orders, syncs=self.syncs, master=self.master)

    def of_job(self, job: JobSpec) -> PlanTable:
        """The same rows, their parameters kept as `job` says."""
        return self if job.master is self.master else replace(self, master=job.master)


def _policies(groups: Sequence[BlockGroup]) -> tuple[Policy, ...]:
    """What is done with every block; () when all are alike."""
    each = [Policy.of(group) for group in groups]
    if len(set(each)) <= 1 and not each[0].shards:
        return ()
    return tuple(
        policy for group, policy in zip(groups, each, strict=True) for _ in range(max(group.stop - group.start, 0))
    )


def column_names() -> tuple[str, ...]:
    """The fields of a PlanTable that have an entry for every row."""
    return tuple(field.name for field in fields(PlanTable) if field.name not in _APART)
