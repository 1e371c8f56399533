"""How far a predicted step may be off: a spread for every cause, weighed by how much of the plan hangs on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import numpy as np

from meshwright.cost.costs import Costs
from meshwright.cost.stacks import software_name
from meshwright.cost.table import OFFLOADS, PRECISIONS, SCHEDULES, BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Mixture, ModelSpec
from meshwright.spec.plan import ScheduleKind
from meshwright.spec.report import LineName


class Cause(StrEnum):
    """Why a step may take another time than predicted.

    The first six are shares of the step: products at the pace of large ones, the rest of compute (launches, attention,
    element-wise work, products too small), collectives between layers, the pipeline's idle time and transfers,
    gradients and parameters, and the rest. The others are what is not known of the whole step: the software's own
    ways, eight-bit recipes, expert layers, a device known by analogy, a vendor or a software of which no run was
    replayed, machines that differ, a schedule or an offload that no run was replayed of, and each doubling of devices
    or of the sequence beyond every run that was.
    """

    PRODUCTS = "matrix products"
    COMPUTE = "other compute"
    COLLECTIVES = "collectives of layers"
    PIPELINE = "pipeline"
    DATA = "gradients and parameters"
    REST = "optimizer, input and host"
    SOFTWARE = "software"
    EIGHT_BIT = "eight-bit recipe"
    EXPERTS = "expert layers"
    ANALOGY = "device known by analogy"
    VENDOR = "vendor never replayed"
    STACK = "software never replayed"
    MIXED = "unlike machines"
    SCHEDULE = "schedule never replayed"
    OFFLOAD = "offload never replayed"
    DEVICES = "doubling of devices beyond evidence"
    LENGTH = "doubling of the sequence beyond evidence"


# Standard deviations of log(measured / predicted) that each cause gives when all of the step hangs on it, and how
# many of them hold nine of ten measured steps. `python benchmarks/published/spread.py` estimates and prints both from
# published runs, every source alike, and of causes that none of those has from runs that were held out
# (`--allowances`); what no run speaks of keeps its prior of 0.15 (0.05 a doubling). Unlike
# machines that were measured add nothing: of a lab whose one host had half a core fourteen steps were as far off as
# those of like ones, 0.055 beside 0.068 (`python benchmarks/network/choice.py`).
SPREADS: Mapping[Cause, float] = MappingProxyType(
    {
        Cause.PRODUCTS: 0.138,
        Cause.COMPUTE: 0.121,
        Cause.COLLECTIVES: 0.400,
        Cause.PIPELINE: 0.091,
        Cause.DATA: 0.155,
        Cause.REST: 0.150,
        Cause.SOFTWARE: 0.090,
        Cause.EIGHT_BIT: 0.101,
        Cause.EXPERTS: 0.149,
        Cause.ANALOGY: 0.098,
        Cause.VENDOR: 0.151,
        Cause.STACK: 0.207,
        Cause.MIXED: 0.155,
        Cause.SCHEDULE: 0.128,
        Cause.OFFLOAD: 0.147,
        Cause.DEVICES: 0.039,
        Cause.LENGTH: 0.040,
    }
)
REACH = 1.52
EVIDENCE_SCHEDULES = (  # paths of gpipe and tables are exact whatever the stages, and their passes those of the others
    ScheduleKind.GPIPE,
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.INTERLEAVED,
    ScheduleKind.ZERO_BUBBLE_H1,
    ScheduleKind.ZERO_BUBBLE_H2,
    ScheduleKind.TABLE,
)
# The most devices and the longest sequence of the runs that SPREADS are from (benchmarks/published/runs.csv): those of
# 2104.04473 on A100, and of llm-foundry.
EVIDENCE_DEVICES = 3072
EVIDENCE_LENGTH = 65536
# The software of those runs, whatever its names say after these.
EVIDENCE_SOFTWARE = (
    *("megatron-2021", "megatron-2022", "megatron-deepspeed", "megatron-core", "megatron-bridge", "nemo"),
    *("torch-2023", "torch-2024", "scaling", "internevo"),
)

_LINES: Mapping[str, Cause] = MappingProxyType(
    {
        LineName.TENSOR: Cause.COLLECTIVES,
        LineName.CONTEXT: Cause.COLLECTIVES,
        LineName.EXPERTS: Cause.COLLECTIVES,
        LineName.TRANSFER: Cause.PIPELINE,
        LineName.BUBBLE: Cause.PIPELINE,
        LineName.GRADIENTS: Cause.DATA,
        LineName.PARAMETERS: Cause.DATA,
        LineName.OUTER: Cause.DATA,
    }
)
_COMPUTE = (LineName.FORWARD, LineName.BACKWARD, LineName.RECOMPUTE)
_SHARES = (Cause.PRODUCTS, Cause.COMPUTE, Cause.COLLECTIVES, Cause.PIPELINE, Cause.DATA, Cause.REST)
_UNSEEN_SCHEDULES = np.array([float(kind not in EVIDENCE_SCHEDULES) for kind in SCHEDULES])
_COUNTED = 0.95  # of the model FLOPs are surely among those counted: look-ups and masks are counted in other ways
_MEASURED_AWAY = (
    *(Cause.PRODUCTS, Cause.COMPUTE, Cause.REST, Cause.SOFTWARE),
    *(Cause.ANALOGY, Cause.VENDOR, Cause.STACK, Cause.MIXED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Multiples of a step's seconds between which nine of ten measured ones lie, shape (rows,)."""

    low: FloatArray
    high: FloatArray


def interval(costs: Costs, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Interval:
    """The interval of every row of `costs`, which are those of `table`."""
    half = REACH * spread(weights(costs, table, model=model, cluster=cluster, job=job), measured=cluster.step_error)
    return Interval(low=np.exp(-half), high=np.exp(half))


def upper(costs: Costs, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> FloatArray:
    """Seconds that nineteen of twenty measured steps stay under, shape (rows,): what a cautious ranking minimises."""
    return costs.step_seconds * interval(costs, table, model=model, cluster=cluster, job=job).high


def least_upper(
    seconds: FloatArray, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> FloatArray:
    """What `upper` is at the least of the plans of `table` where their steps take `seconds` or more, shape (rows,).

    What a plan is known to be counts in full. The variance of shares that are one in sum is least where each is as the
    inverse square of its spread; products take no less than all FLOPs at the pace of large ones, and more of them than
    that is more variance. Where a step is longer its share of products is less, but its upper end more.
    """
    some, at = _alike(table)
    fixed = spread(_settled(some, model=model, cluster=cluster, job=job), measured=cluster.step_error)[at] ** 2
    if cluster.step_error is not None:
        return np.asarray(seconds * np.exp(REACH * np.sqrt(fixed)))
    rates = [max(_large_products(group.device, precision) for group in cluster.groups) for precision in PRECISIONS]
    rate = np.array(rates)[table.precision]
    flops = _COUNTED * model.flops_per_token(job.sequence_length) * job.batch_tokens
    rest = 1.0 / sum(SPREADS[cause] ** -2.0 for cause in _SHARES[1:])
    even = rest / (rest + SPREADS[Cause.PRODUCTS] ** 2)
    products = np.where(rate > 0.0, flops / (table.world * np.maximum(rate, 1.0)) / seconds, 0.0)
    share = np.clip(products, even, 1.0)
    variance = np.square(share * SPREADS[Cause.PRODUCTS]) + np.square(1.0 - share) * rest
    return np.asarray(seconds * np.exp(REACH * np.sqrt(fixed + variance)))


def _alike(table: PlanTable) -> tuple[PlanTable, IntArray]:
    """A row of every kind that `_settled` tells apart, and which of them every row is like."""
    sizes = np.unique(table.world)
    key = np.searchsorted(sizes, table.world)
    for column, kinds in ((table.schedule, SCHEDULES), (table.offload, OFFLOADS), (table.precision, PRECISIONS)):
        key = key * len(kinds) + column
    row = np.full(int(key.max(initial=0)) + 1, -1)
    row[key] = np.arange(len(table))
    found = np.flatnonzero(row >= 0)
    return table.take(row[found]), np.searchsorted(found, key)


def spread(
    weight: Mapping[Cause, FloatArray], *, measured: float | None = None, spreads: Mapping[Cause, float] = SPREADS
) -> FloatArray:
    """Standard deviation of log(measured / predicted), shape (rows,): the root of the sum of squares of all causes.

    Where whole steps were compared on the very machines, `measured` (ClusterSpec.step_error) stands for what those
    steps could show: compute, the software and the devices. Traffic, recipes and sizes keep their own.
    """
    squares = [np.square(values) for values in doubts(weight, measured=measured, spreads=spreads).values()]
    return np.asarray(np.sqrt(np.sum(squares, axis=0) + (measured or 0.0) ** 2))


def doubts(
    weight: Mapping[Cause, FloatArray], *, measured: float | None = None, spreads: Mapping[Cause, float] = SPREADS
) -> dict[Cause, FloatArray]:
    """What each cause adds to `spread`, shape (rows,), but for those that `measured` stands for."""
    away = _MEASURED_AWAY if measured is not None else ()
    return {cause: values * spreads[cause] for cause, values in weight.items() if cause not in away}


def weights(
    costs: Costs, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> dict[Cause, FloatArray]:
    """How much of every row hangs on each cause, shape (rows,): shares of the step, zero or one, or doublings."""
    return _shares(costs, table, cluster=cluster) | _settled(table, model=model, cluster=cluster, job=job)


def _settled(table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> dict[Cause, FloatArray]:
    """Of `weights`, those that a plan settles whatever its seconds."""
    rows, used = len(table), _used(table, cluster)
    eight_bit = np.array([precision.quantized for precision in PRECISIONS])[table.precision]

    def any_device(unknown: list[bool]) -> FloatArray:
        return np.asarray((used & np.array(unknown)).any(axis=1), dtype=np.float64)

    devices = [group.device for group in cluster.groups]
    return {
        Cause.SOFTWARE: np.ones(rows),
        Cause.SCHEDULE: _UNSEEN_SCHEDULES[table.schedule],
        Cause.OFFLOAD: (table.offload > 0).astype(np.float64),
        Cause.EIGHT_BIT: eight_bit.astype(np.float64),
        Cause.EXPERTS: np.full(rows, float(_has_experts(model))),
        Cause.ANALOGY: any_device([by_analogy(device) for device in devices]),
        Cause.VENDOR: any_device([_is_unseen(device) for device in devices]),
        Cause.STACK: np.full(rows, float(not is_replayed(software_name(job, cluster)))),
        Cause.MIXED: any_device([device.name != devices[0].name for device in devices]),
        Cause.DEVICES: np.log2(np.maximum(table.world / EVIDENCE_DEVICES, 1.0)),
        Cause.LENGTH: np.full(rows, _doublings(job)),
    }


def by_analogy(device: DeviceSpec) -> bool:
    """Whether nobody measured matrix products on this very device, as the source of their figures tells."""
    source = device.sources.get("matrix", "")
    return not source or source.startswith("by analogy")


def is_replayed(name: str) -> bool:
    """Whether runs of the software called `name`, or of a variant of it, were replayed."""
    plain = name.partition(":")[0]
    return any(plain == known or plain.startswith(f"{known}-") for known in EVIDENCE_SOFTWARE)


def _is_unseen(device: DeviceSpec) -> bool:
    """Of a vendor of whose devices no run was replayed, as one that is told as another may be."""
    return device.sources.get("kind", "").startswith("by analogy") or device.kind not in (
        DeviceKind.CUDA,
        DeviceKind.CPU,
    )


def _has_experts(model: ModelSpec) -> bool:
    return any(isinstance(layer.transform, Mixture) for layer in model.layers)


def _doublings(job: JobSpec) -> float:
    """Of the sequence beyond the longest that was replayed."""
    return max(0.0, math.log2(job.sequence_length / EVIDENCE_LENGTH))


def _shares(costs: Costs, table: PlanTable, *, cluster: ClusterSpec) -> dict[Cause, FloatArray]:
    """Seconds of each cause over those of the step; shares of rows that cannot run at all are zero."""
    step = np.where(costs.finite, costs.step_seconds, np.inf)
    shares = {cause: np.zeros(len(table)) for cause in (*_LINES.values(), Cause.REST)}
    for name, seconds in costs.parts.items():
        if name not in _COMPUTE:
            cause = _LINES.get(name, Cause.REST)
            shares[cause] = shares[cause] + np.where(costs.finite, seconds, 0.0) / step
    compute, once = (
        np.where(costs.finite, np.sum([costs.parts[name] for name in names], axis=0), 0.0) / step
        for names in (_COMPUTE, _COMPUTE[:2])
    )
    rate = _rate(table, cluster)
    least = costs.figures["flops"] / np.maximum(rate, 1.0) / step
    products = np.where(rate > 0.0, np.minimum(least / np.maximum(once, 1e-30), 1.0), 0.0)
    return {Cause.PRODUCTS: compute * products, Cause.COMPUTE: compute * (1.0 - products)} | shares


def _rate(table: PlanTable, cluster: ClusterSpec) -> FloatArray:
    """FLOP/s of large products on the slowest device of every row; 0 where that is not known."""
    found = []
    for group in cluster.groups:
        device = group.device
        own = [_large_products(device, precision) for precision in PRECISIONS]
        found.append(np.array(own)[table.precision])
    return np.asarray(np.where(_used(table, cluster), np.stack(found, axis=1), np.inf).min(axis=1))


def _large_products(device: DeviceSpec, precision: Precision) -> float:
    """FLOP/s that large products reach; 0 where that is not known."""
    curve = device.matrix.get(precision)
    return device.peak_flops.get(precision, 0.0) * (curve.fraction if curve else 0.0)


def _used(table: PlanTable, cluster: ClusterSpec) -> BoolArray:
    """Which groups of machines every row uses, shape (rows, groups): the first devices, as many as its world."""
    starts = np.cumsum([0, *(group.num_devices for group in cluster.groups)])[:-1]
    return np.asarray(table.world[:, None] > starts, dtype=np.bool_)
