"""The space: every legal plan, as frames (how the model is divided) times what may be chosen inside each.

What is chosen inside a frame (microbatch, schedule, sharding, recompute, offload) is the same for all frames of one
pipeline and data parallel size, so that spaces of many millions are listed without being written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshwright.cost import Layout, PlanTable
from meshwright.cost.meeting import USUAL_MEETINGS, Meeting, meetings_of
from meshwright.cost.table import EXCHANGES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS, TOKEN_LAYOUTS
from meshwright.schedule import stage_rank
from meshwright.search.constraints import Limits, limits
from meshwright.search.context_rules import mixtures
from meshwright.search.job_rules import allowed_meetings, allowed_precisions, check_job
from meshwright.search.lies import Lies, lies
from meshwright.search.meetings import COMPRESSED, EVERY_STEP, Key, choose_meetings, shards_of_grid
from meshwright.search.precisions import add_precisions
from meshwright.search.product import Columns, Product, Rejection, merged
from meshwright.search.rules import divisors
from meshwright.search.runtime_rules import lacks_flash, trained_precisions, untrained, untrained_with_context
from meshwright.search.schedules import add_schedules
from meshwright.search.tensor_degrees import SHARED, tensor_heads
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec, Recurrence
from meshwright.spec.plan import Offload, Sharding
from meshwright.spec.synchronize import MEETINGS

Boundaries = Callable[[int, Sequence[int], int], Sequence[int]]
Ids = npt.NDArray[np.int64]
UNSHARDED = SHARDINGS.index(Sharding.NONE)
RING, GATHER = (EXCHANGES.index(kind) for kind in (ExchangeKind.RING, ExchangeKind.GATHER))
_BASE = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """What may be chosen inside a frame of one pipeline and data parallel size, each of `columns` with each of `rungs`,
    which are of recompute and offload, and what was refused."""

    columns: Columns
    rungs: Columns
    rejections: Mapping[str, Rejection]

    def __len__(self) -> int:
        return len(self.columns["microbatch"]) * len(self.rungs["recompute"])

    def crossed(self) -> Columns:
        """Every plan as a row."""
        size, rungs = len(self.columns["microbatch"]), len(self.rungs["recompute"])
        return {name: np.repeat(values, rungs) for name, values in self.columns.items()} | {
            name: np.tile(values, size) for name, values in self.rungs.items()
        }

    def plain(self) -> Inner:
        """Rows with the least recompute and offload that are allowed."""
        least = [values == values.min(initial=len(RECOMPUTES)) for values in self.rungs.values()]
        return replace(self, rungs={name: values[least[0] & least[1]] for name, values in self.rungs.items()})

    def lightest(self) -> Inner:
        """Rows among which is the one that holds least in every frame."""
        columns = self.columns
        if not len(self):
            return self
        small = columns["microbatch"] == columns["microbatch"].min()
        widest = (columns["shard"] == columns["shard"].max()) | (columns["sharding"] == UNSHARDED)
        fewest = np.full(len(SCHEDULES), columns["chunks"].max())
        np.minimum.at(fewest, columns["schedule"], columns["chunks"])
        mask = small & widest & (columns["chunks"] == fewest[columns["schedule"]])
        mask = mask if mask.any() else np.ones_like(mask)
        return replace(self, columns={name: values[mask] for name, values in columns.items()})


@dataclass(frozen=True, kw_only=True)
class Space:
    """The legal plans of a job on a cluster, and what was refused on the way.

    `frames` are columns of tensor, context, expert, pipeline and data parallel sizes and of the precision; `inner[key]`
    what each frame of that key (pipeline, data, whether there is a context axis) may choose; where learners may meet,
    keys tell grids of experts apart that a learner does not hold either. `boundaries` are of stages by precision,
    `lies` the machines under the pipeline ranks of frames, `syncs` the ways in which replicas may meet.
    """

    frames: Columns
    keys: Ids
    inner: Mapping[int, Inner]
    boundaries: Mapping[int, Boundaries]
    lies: Lies
    rejected: tuple[Rejection, ...]
    syncs: tuple[Meeting, ...] = USUAL_MEETINGS
    layouts: dict[tuple[int, ...], int] = field(default_factory=dict)
    made: list[Layout] = field(default_factory=list)

    @cached_property
    def sizes(self) -> Ids:
        """Plans of every frame."""
        return np.array([len(self.inner[int(key)]) for key in self.keys], dtype=np.int64)

    @property
    def count(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def table(self) -> PlanTable:
        """Every plan as a row. Of a large space this is large."""
        return self.rows_of(np.arange(len(self.keys)))

    def rows_of(self, frames: Ids) -> PlanTable:
        """The plans of `frames`, frame by frame."""
        counts = self.sizes[frames]
        if not int(counts.sum()):
            return PlanTable.build({"tensor": np.zeros(0, dtype=np.int64)}, layouts=())
        columns: dict[str, npt.ArrayLike] = {
            name: np.repeat(values[frames], counts) for name, values in self.frames.items() if name != "data"
        }
        chosen = [self.inner[int(key)].crossed() for key in self.keys[frames]]
        for name in chosen[0]:
            columns[name] = np.concatenate([entry[name] for entry in chosen])
        columns["layout"] = self.layouts_of(columns, lies=np.repeat(self.lies.of[frames], counts))
        return PlanTable.build(columns, layouts=tuple(self.made), syncs=self.syncs)

    @cached_property
    def lightest(self) -> Space:
        """The same frames, of each only plans among which is the one that holds least."""
        return replace(self, inner={key: entry.lightest() for key, entry in self.inner.items()})

    @cached_property
    def plain(self) -> Space:
        """The same frames with the least recompute and offload that are allowed."""
        return replace(self, inner={key: entry.plain() for key, entry in self.inner.items()})

    @cached_property
    def rungs(self) -> tuple[list[int], list[int]]:
        """The recompute and the offload that some frame may choose."""
        return self.values("recompute"), self.values("offload")

    def values(self, name: str) -> list[int]:
        """What some frame may choose in the column `name`, in order."""
        entries = [entry for entry in self.inner.values() if len(entry)]
        found = [entry.rungs[name] if name in entry.rungs else entry.columns[name] for entry in entries]
        return np.unique(np.concatenate(found)).tolist() if found else []

    def frame_of(self, frames: Ids) -> Ids:
        """The frame of every row of `rows_of(frames)`."""
        return np.repeat(frames, self.sizes[frames])

    def layouts_of(self, columns: Mapping[str, npt.ArrayLike], *, lies: Ids) -> Ids:
        """The layout of every row, the machines under which are numbered in `lies`; rows alike in these and in
        precision, pipeline, chunks and placement share one."""
        names = ("pipeline", "chunks", "schedule", "precision")
        pipeline, chunks, kind, precision = (np.asarray(columns[name]) for name in names)
        codes = ((pipeline * _BASE + chunks) * len(SCHEDULES) + kind) * len(PRECISIONS) + precision
        alike, index = np.unique(codes, return_inverse=True)
        most = int(lies.max(initial=0)) + 1
        pairs, index = np.unique(index.reshape(-1) * most + lies, return_inverse=True)
        found = []
        for place, among in zip((pairs % most).tolist(), (pairs // most).tolist(), strict=True):
            rest, number = divmod(int(alike[among]), len(PRECISIONS))
            rest, schedule = divmod(rest, len(SCHEDULES))
            ranks, stages = divmod(rest, _BASE)
            found.append(self._layout(ranks, stages, schedule, number, place))
        return np.asarray(np.array(found, dtype=np.int64)[index.reshape(-1)], dtype=np.int64)

    def _layout(self, pipeline: int, chunks: int, schedule: int, precision: int, lies: int) -> int:
        """The index of a layout, which is made where it is asked for first."""
        asked = (pipeline, chunks, schedule, precision, lies)
        if asked not in self.layouts:
            kind, stages = SCHEDULES[schedule], range(pipeline * chunks)
            ranks = tuple(stage_rank(kind, stage, pipeline=pipeline, chunks=chunks) for stage in stages)
            plain = ranks == tuple(stage % pipeline for stage in stages)
            key = (pipeline, chunks, -1 if plain else schedule, precision, lies)
            if key not in self.layouts:
                self.layouts[key] = len(self.made)
                bounds = self.boundaries[precision](pipeline, ranks, self.lies.devices[pipeline, lies])
                self.made.append(Layout(bounds=tuple(bounds), ranks=ranks))
            self.layouts[asked] = self.layouts[key]
        return self.layouts[asked]


def enumerate_plans(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    boundaries: Boundaries | Mapping[Precision, Boundaries],
    trainable: bool = False,
) -> Space:
    """Every plan that the rules of scope `plan` allow, one layout of stages for all that divide them alike.

    `boundaries(pipeline, ranks, devices)` gives the boundaries of the stages that ranks hold on the first so many
    devices, or one such is given a precision; `trainable` leaves out what this runtime cannot train. Plans that differ
    in name alone are listed once: one pipeline rank runs 1f1b; chunk counts whose largest stage is equal are one, the
    smallest; a context axis of one exchanges nothing. Raises ConfigError when the job itself is wrong. A space without
    plans is a possible answer.
    """
    asked = limits(job.constraints)
    if trainable:
        asked = asked.without(untrained(job))
    check_job(model, cluster, job)
    precisions, product = allowed_precisions(job, cluster), Product(asked)
    _tensor(product, model, cluster, job)
    _context(product, model, cluster, job)
    _pipeline_and_data(product, model, cluster, job)
    _experts(product, model)
    trained = trained_precisions(cluster, model) if trainable else precisions
    add_precisions(product, cluster, job, trained=trained, tiles=not (trainable and lacks_flash(cluster)))
    most = int(product["context"].max(initial=1))
    beside = asked.without(untrained_with_context(job.sequence_length, context=most)) if trainable else asked
    keys = (product["pipeline"] * _BASE + product["data"]) * 2 + (product["context"] > 1)
    meetings = [MEETINGS.index(word) for word in allowed_meetings(job)]
    if meetings != [EVERY_STEP]:
        held = np.stack([keys, shards_of_grid(product), product["expert"] > 0])
        keys = np.unique(held, axis=1, return_inverse=True)[1].reshape(-1)
    distinct, first, frames = np.unique(keys, return_index=True, return_counts=True)
    inner = {
        int(key): _inner(
            Key.of(product, row, meetings=meetings),
            asked=beside if product["context"][row] > 1 else asked,
            model=model,
            cluster=cluster,
            job=job,
        )
        for key, row in zip(distinct, first.tolist(), strict=True)
    }
    refused = merged(
        [product.rejections, *(entry.rejections for entry in inner.values())], [1, *(int(count) for count in frames)]
    )
    return Space(
        frames=product.columns,
        keys=keys,
        inner=inner,
        boundaries={
            PRECISIONS.index(kind): boundaries[kind] if isinstance(boundaries, Mapping) else boundaries
            for kind in precisions
        },
        lies=lies(cluster, pipeline=product["pipeline"], world=_world(product)),
        rejected=tuple(sorted(refused.values(), key=lambda rejection: -rejection.count)),
        syncs=meetings_of(job),
    )


def _tensor(product: Product, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    devices = cluster.num_devices
    most = min(devices, max(tensor_heads(model), default=devices))
    whole = job.constraints.devices == "all"
    product.times(["tensor"], [[degree] for degree in range(1, most + 1) if not whole or devices % degree == 0])
    for shared in SHARED:
        product.keep(shared.degrees(model, product["tensor"]), shared.rule)
    product.constrain("tensor", product["tensor"])
    product.times(["sequence_parallel"], [[0], [1]])
    product.keep((product["tensor"] > 1) | (product["sequence_parallel"] == 0))
    divides = job.sequence_length % product["tensor"] == 0
    product.keep(divides | (product["sequence_parallel"] == 0), "sequence-parallel-divides")
    product.constrain("sequence_parallel", product["sequence_parallel"], ("off", "on"))


def _context(product: Product, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    """The context axis and how its ranks exchange; an axis of one exchanges nothing."""
    devices, length, whole = cluster.num_devices, job.sequence_length, job.constraints.devices == "all"
    degrees = [size for size in divisors(length) if length % (2 * size) == 0 and 1 < size <= devices]
    degrees = [size for size in degrees if not whole or devices % size == 0]
    product.join(
        ["context"], product["tensor"], lambda tensor: [[1], *([size] for size in degrees if size * tensor <= devices)]
    )
    product.constrain("context", product["context"])
    product.join(["inner", "exchange"], product["context"], _exchanges)
    product.constrain("inner", product["inner"])
    product.constrain("exchange", product["exchange"], [kind.value for kind in EXCHANGES])
    product.times(["token_layout"], [[TOKEN_LAYOUTS.index(_token_layout(product.asked, model))]])
    product.constrain("token_layout", product["token_layout"], [layout.value for layout in TOKEN_LAYOUTS])
    for heads in tensor_heads(model):
        product.keep(heads // product["tensor"] % product["inner"] == 0, "exchange-divides")
    alone = product["context"] == 1
    if any(isinstance(layer.mixer, Recurrence) for layer in model.layers):
        product.keep(alone | (product["inner"] == product["context"]), "context-attends")
    divides = length // product["context"] % product["tensor"] == 0
    product.keep(divides | (product["sequence_parallel"] == 0), "sequence-parallel-divides")


def _token_layout(asked: Limits, model: ModelSpec) -> TokenLayout:
    """Which tokens context ranks hold: the first of these that may be. Of causal masks none is better while documents
    are not known; under a prefix mask a zigzag leaves the rank of the last tokens most to do."""
    even = (TokenLayout.BALANCED, TokenLayout.STRIPED)
    order = (*even, TokenLayout.ZIGZAG) if model.prefix else (TokenLayout.ZIGZAG, *even)
    allowed = (layout for layout in (*order, TokenLayout.CONTIGUOUS) if not asked.refusal("token_layout", layout.value))
    return next(allowed, TokenLayout.ZIGZAG)


def _exchanges(context: int) -> list[list[int]]:
    """(inner, kind) of a context axis: both kinds, but where all of it trades heads there is nothing left to choose."""
    if context == 1:
        return [[1, RING]]
    return [[inner, kind] for inner in divisors(context) for kind in (RING, GATHER) if inner < context or kind == RING]


def _pipeline_and_data(product: Product, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    devices, sequences, whole = cluster.num_devices, job.batch_sequences, job.constraints.devices == "all"
    most = min(devices, len(model.blocks))
    product.times(["pipeline"], [[size] for size in range(1, most + 1) if not whole or devices % size == 0])
    product.constrain("pipeline", product["pipeline"])
    inner = product["tensor"] * product["context"] * product["pipeline"]
    product.keep(inner <= devices, "world-fits")
    inner = product["tensor"] * product["context"] * product["pipeline"]
    if whole:
        product.keep(devices % inner == 0, "world-is-whole")
        inner = product["tensor"] * product["context"] * product["pipeline"]
        product.columns["data"] = devices // inner
        product.keep(sequences % product["data"] == 0, "batch-is-asked")
    else:
        product.join(["data"], inner, lambda size: [[data] for data in divisors(sequences) if data * size <= devices])
    product.constrain("data", product["data"])
    product.constrain("devices", _world(product))


def _world(product: Product) -> Ids:
    return product["tensor"] * product["context"] * product["pipeline"] * product["data"]


def _experts(product: Product, model: ModelSpec) -> None:
    """The grid of experts; 0 by 0 is none, which a grid that divides experts as the tensor axis does would repeat."""
    parts = tuple(mixtures(model))
    ranks = product["tensor"] * product["context"] * product["data"]

    def grids(size: int) -> list[list[int]]:
        found = [[0, 0]]
        for expert in divisors(size) if parts else ():
            if any(part.experts % expert for part in parts):
                continue
            slices = (count for count in divisors(size // expert) if all(part.hidden % count == 0 for part in parts))
            found += [[expert, count] for count in slices]
        return found

    product.join(["expert", "expert_tensor"], ranks, grids)
    expert, slices = product["expert"], product["expert_tensor"]
    product.keep(~((expert == 1) & (slices == product["tensor"])))
    splits = (product["tensor"] == 1) | (product["sequence_parallel"] == 1) | (product["expert"] == 0)
    product.keep(splits, "experts-divide")
    product.constrain("expert", np.maximum(product["expert"], 1))
    held = np.where(product["expert"] > 0, product["expert_tensor"], product["tensor"])
    product.constrain("expert_tensor", held)


def _inner(key: Key, *, asked: Limits, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Inner:
    """What frames of one pipeline and data parallel size may choose, with or without a context axis."""
    data, context = key.data, key.context
    product = Product(asked, {"pipeline": np.array([key.pipeline]), "data": np.array([data])})
    local = job.batch_sequences // data
    product.times(["microbatch"], [[size] for size in divisors(local)])
    product.columns["microbatches"] = local // product["microbatch"]
    product.constrain("microbatch", product["microbatch"])
    add_schedules(product, model, length=job.sequence_length)
    degrees = range(1, len(SHARDINGS))
    sharded = [[shard, kind] for shard in divisors(data) for kind in degrees if shard > 1 or context]
    product.times(["shard", "sharding"], [[1, UNSHARDED], *sharded])
    product.columns["replicate"] = product["data"] // product["shard"]
    product.constrain("shard", product["shard"])
    product.constrain("replicate", product["replicate"])
    product.constrain("zero", product["sharding"], [kind.value for kind in SHARDINGS])
    choose_meetings(product, key, job)
    hosted = all(group.host is not None for group in cluster.groups)
    # Slower than whatever else fits, parameters leave the device only where that is asked for.
    asks = asked.fixed.get("offload") == Offload.PARAMETERS.value
    product.keep((product["sharding"] == SHARDINGS.index(Sharding.PARAMETERS)) | (not asks), "offload-has-shards")
    product.keep((product["sync"] < COMPRESSED) | (not asks), "compression-is-laid")
    rungs = Product(asked)
    rungs.times(["recompute"], [[index] for index in range(len(RECOMPUTES))])
    rungs.constrain("recompute", rungs["recompute"], [kind.value for kind in RECOMPUTES])
    kinds = [kind for kind in Offload if hosted and (asks or kind is not Offload.PARAMETERS)]
    rungs.times(["offload"], [[OFFLOADS.index(kind)] for kind in kinds or [Offload.NONE]])
    rungs.constrain("offload", rungs["offload"], [kind.value for kind in OFFLOADS])
    product.refuse_with_each(rungs)
    columns = {name: values for name, values in product.columns.items() if name not in ("pipeline", "data")}
    return Inner(columns=columns, rungs=rungs.columns, rejections=product.rejections)
