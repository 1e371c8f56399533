"""The space: every legal plan as a row of one table, built by outer products; what each rule refused is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost import Layout, PlanTable
from meshwright.cost.table import PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.search.constraints import Limits, limits
from meshwright.search.degree_rules import DIVIDED
from meshwright.search.rules import divisors
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ScheduleKind, Sharding

Columns = dict[str, npt.NDArray[np.int64]]
Mask = npt.NDArray[np.bool_]
Boundaries = Callable[[int, int], Sequence[int]]

ONE_F_ONE_B = SCHEDULES.index(ScheduleKind.ONE_F_ONE_B)
GPIPE = SCHEDULES.index(ScheduleKind.GPIPE)
INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)
UNSHARDED = SHARDINGS.index(Sharding.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """`count` combinations refused by `rule` at the step of the search that asks it, and one of them in words."""

    rule: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The legal plans of a job on a cluster, and what was refused on the way.

    `hopeless` legal plans were left out of the table because their states alone are more than a device holds.
    """

    table: PlanTable
    rejected: tuple[Rejection, ...]
    hopeless: int = 0


class _Product:
    """An outer product that grows by one column at a time and loses what a rule refuses."""

    def __init__(self, asked: Limits) -> None:
        self.columns: Columns = {}
        self.asked = asked
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    @property
    def rows(self) -> int:
        return next(iter(self.columns.values())).shape[0] if self.columns else 1

    def times(self, names: Sequence[str], values: Sequence[Sequence[int]]) -> None:
        """Cross every row with every entry of `values`, one entry naming a value for each of `names`."""
        added = np.array(values, dtype=np.int64).reshape(len(values), len(names))
        rows = self.rows
        self.columns = {name: np.repeat(column, len(added)) for name, column in self.columns.items()}
        for index, name in enumerate(names):
            self.columns[name] = np.tile(added[:, index], rows)

    def keep(self, mask: Mask, rule: str | None = None) -> None:
        """Keep the rows of the mask; with a rule, count the others under its name."""
        refused = int(mask.size - np.count_nonzero(mask))
        if refused and rule is not None:
            self.counts[rule] = self.counts.get(rule, 0) + refused
            self.examples.setdefault(rule, self.describe(int(np.argmin(mask))))
        if refused:
            self.columns = {name: column[mask] for name, column in self.columns.items()}

    def constrain(self, name: str, values: npt.NDArray[np.int64], words: Sequence[str] | None = None) -> None:
        """Drop the rows whose value of the constraint column `name` the job refuses."""
        distinct, inverse = np.unique(values, return_inverse=True)
        allowed = [self.asked.allows(name, words[int(value)] if words else int(value)) for value in distinct]
        if not all(allowed):
            self.keep(np.array(allowed, dtype=np.bool_)[inverse], "keeps-constraints")

    def describe(self, row: int) -> str:
        return ", ".join(_word(name, int(column[row])) for name, column in self.columns.items())

    def rejections(self) -> tuple[Rejection, ...]:
        found = (Rejection(rule=rule, count=count, example=self.examples[rule]) for rule, count in self.counts.items())
        return tuple(sorted(found, key=lambda rejection: -rejection.count))


def enumerate_plans(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, boundaries: Boundaries) -> Space:
    """Every plan that the rules of scope `plan` allow, one layout of stages for each (pipeline, chunks).

    `boundaries(pipeline, chunks)` gives the boundaries of a layout's stages. Plans that differ in name alone are
    listed once: one pipeline rank runs 1f1b; chunk counts whose largest stage is equal are one, the smallest.
    Raises ConfigError when the job itself is wrong. An empty table is a possible answer.
    """
    asked = limits(job.constraints)
    precision = Precision(str(asked.fixed.get("precision", job.precision.value)))
    check_job(model, cluster, job, precision=precision)
    product = _Product(asked)
    refusal = asked.refusal("precision", precision.value)
    if refusal:
        raise ConfigError(Problem(where="job.precision", what=f"{precision.value} is forbidden by {refusal}"))
    _tensor(product, model, cluster, job)
    _pipeline_and_data(product, model, cluster, job)
    _microbatches(product, job)
    _schedules(product, len(model.blocks))
    _sharding(product)
    _choices(product, job)
    layouts, index = _layouts(product, boundaries)
    columns: dict[str, npt.ArrayLike] = {name: column for name, column in product.columns.items() if name != "data"}
    columns["layout"] = index
    columns["precision"] = PRECISIONS.index(precision)
    table = PlanTable.build(columns, layouts=layouts)
    return Space(table=table, rejected=product.rejections())


def check_job(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, precision: Precision) -> None:
    """Raises ConfigError for what no choice of plan can mend."""
    problems = []
    if job.sequence_length < 1 or job.batch_tokens < job.sequence_length or job.batch_tokens % job.sequence_length:
        length = max(job.sequence_length, 1)
        whole = max(1, round(job.batch_tokens / length)) * length
        what = f"{job.batch_tokens:,} tokens are not whole sequences of {job.sequence_length:,}"
        fix = f"choose {whole}" if job.sequence_length >= 1 else "choose a sequence length of 1 or more"
        problems.append(Problem(where="job.batch_tokens", what=what, why="rule batch-is-asked", fix=fix))
    positions = model.embedding.positions
    if positions and job.sequence_length > positions:
        what = f"{job.sequence_length:,} is more than the {positions:,} positions the model has learned"
        fix = f"choose {positions} or less"
        problems.append(Problem(where="job.sequence_length", what=what, why="rule sequence-fits-positions", fix=fix))
    problems += _precision_problems(cluster, job, precision)
    if problems:
        raise ConfigError(problems)


def _precision_problems(cluster: ClusterSpec, job: JobSpec, precision: Precision) -> list[Problem]:
    """Devices that cannot multiply in `precision`, with the precisions that all of them can, the fastest first."""
    devices = {group.device.name: group.device for group in cluster.groups}
    first = cluster.groups[0].device.peak_flops
    common = [kind for kind in first if all(device.peak_flops.get(kind) for device in devices.values())]
    common.sort(key=lambda kind: -first[kind])
    field = "constraints.fix.precision" if "precision" in job.constraints.fix else "precision"
    others = f" (or {', '.join(kind.value for kind in common[1:])})" if common[1:] else ""
    fix = f"--set {field}={common[0].value}{others}" if common else "choose devices with a precision in common"
    return [
        Problem(
            where=f"job.{field}",
            what=f"{name} has no {precision.value} arithmetic",
            why="rule precision-known",
            fix=fix,
        )
        for name, device in devices.items()
        if not device.peak_flops.get(precision)
    ]


def _tensor(product: _Product, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    devices = cluster.num_devices
    most = min(devices, max((size for _, _, sizes in DIVIDED[:1] for size in sizes(model)), default=devices))
    whole = job.constraints.devices == "all"
    product.times(["tensor"], [[degree] for degree in range(1, most + 1) if not whole or devices % degree == 0])
    for name, _, sizes in DIVIDED:
        divides = np.ones(product.rows, dtype=np.bool_)
        for size in sizes(model):
            divides &= size % product.columns["tensor"] == 0
        product.keep(divides, name)
    product.constrain("tensor", product.columns["tensor"])


def _pipeline_and_data(product: _Product, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    devices, sequences = cluster.num_devices, job.batch_sequences
    product.times(["pipeline"], [[degree] for degree in range(1, min(devices, len(model.blocks)) + 1)])
    product.constrain("pipeline", product.columns["pipeline"])
    inner = product.columns["tensor"] * product.columns["pipeline"]
    product.keep(inner <= devices, "world-fits")
    if job.constraints.devices == "all":
        inner = product.columns["tensor"] * product.columns["pipeline"]
        product.keep(devices % inner == 0, "world-is-whole")
        inner = product.columns["tensor"] * product.columns["pipeline"]
        product.columns["data"] = devices // inner
        product.keep(sequences % product.columns["data"] == 0, "batch-is-asked")
    else:
        product.times(["data"], [[degree] for degree in divisors(sequences) if degree <= devices])
        world = product.columns["tensor"] * product.columns["pipeline"] * product.columns["data"]
        product.keep(world <= devices, "world-fits")
    product.constrain("data", product.columns["data"])
    world = product.columns["tensor"] * product.columns["pipeline"] * product.columns["data"]
    product.constrain("devices", world)


def _microbatches(product: _Product, job: JobSpec) -> None:
    product.times(["microbatch"], [[size] for size in divisors(job.batch_sequences)])
    local = job.batch_sequences // product.columns["data"]
    product.keep(local % product.columns["microbatch"] == 0)
    local = job.batch_sequences // product.columns["data"]
    product.columns["microbatches"] = local // product.columns["microbatch"]
    product.constrain("microbatch", product.columns["microbatch"])


def _schedules(product: _Product, blocks: int) -> None:
    most = blocks // 2
    kinds = [[ONE_F_ONE_B, 1], [GPIPE, 1], *([INTERLEAVED, chunks] for chunks in range(2, most + 1))]
    product.times(["schedule", "chunks"], kinds)
    pipeline, chunks = product.columns["pipeline"], product.columns["chunks"]
    interleaved = product.columns["schedule"] == INTERLEAVED
    largest = -(-blocks // (pipeline * chunks))
    before = -(-blocks // (pipeline * np.maximum(chunks - 1, 1)))
    smallest = ~interleaved | (largest < before) | ("chunks" in product.asked.fixed)
    distinct = (chunks * pipeline <= blocks) & smallest
    product.keep(distinct & ((pipeline > 1) | (product.columns["schedule"] == ONE_F_ONE_B)))
    product.constrain("schedule", product.columns["schedule"], [kind.value for kind in SCHEDULES])
    product.constrain("chunks", product.columns["chunks"])
    schedule = product.columns["schedule"]
    fills = product.columns["microbatches"] >= product.columns["pipeline"]
    product.keep(fills | (schedule == GPIPE), "microbatches-fill")
    schedule = product.columns["schedule"]
    rounds = product.columns["microbatches"] % product.columns["pipeline"] == 0
    product.keep(rounds | (schedule != INTERLEAVED), "microbatches-round")


def _sharding(product: _Product) -> None:
    widest = int(np.lcm.reduce(np.unique(product.columns["data"]))) if product.rows else 1
    degrees = [degree for degree in divisors(widest) if degree <= int(product.columns["data"].max(initial=1))]
    kinds = [[1, UNSHARDED], *([degree, kind] for degree in degrees[1:] for kind in range(len(SHARDINGS)) if kind)]
    product.times(["shard", "sharding"], kinds)
    product.keep(product.columns["data"] % product.columns["shard"] == 0)
    product.columns["replicate"] = product.columns["data"] // product.columns["shard"]
    product.constrain("shard", product.columns["shard"])
    product.constrain("replicate", product.columns["replicate"])
    product.constrain("zero", product.columns["sharding"], [kind.value for kind in SHARDINGS])


def _choices(product: _Product, job: JobSpec) -> None:
    product.times(["recompute"], [[index] for index in range(len(RECOMPUTES))])
    product.constrain("recompute", product.columns["recompute"], [kind.value for kind in RECOMPUTES])
    product.times(["sequence_parallel"], [[0], [1]])
    product.keep((product.columns["tensor"] > 1) | (product.columns["sequence_parallel"] == 0))
    divides = job.sequence_length % product.columns["tensor"] == 0
    product.keep(divides | (product.columns["sequence_parallel"] == 0), "sequence-parallel-divides")
    product.constrain("sequence_parallel", product.columns["sequence_parallel"], ("off", "on"))


def _layouts(product: _Product, boundaries: Boundaries) -> tuple[tuple[Layout, ...], npt.NDArray[np.int64]]:
    base = 1 << 20
    keys, index = np.unique(product.columns["pipeline"] * base + product.columns["chunks"], return_inverse=True)
    layouts = []
    for key in keys:
        pipeline, chunks = divmod(int(key), base)
        ranks = tuple(stage % pipeline for stage in range(pipeline * chunks))
        layouts.append(Layout(bounds=tuple(boundaries(pipeline, chunks)), ranks=ranks))
    return tuple(layouts), index.astype(np.int64)


_NAMES: Mapping[str, Sequence[str]] = {
    "schedule": [kind.value for kind in SCHEDULES],
    "sharding": [kind.value for kind in SHARDINGS],
    "recompute": [kind.value for kind in RECOMPUTES],
    "sequence_parallel": ["off", "on"],
}


def _word(name: str, value: int) -> str:
    words = _NAMES.get(name)
    return f"{name.replace('_', ' ')} {words[value] if words else value}"
