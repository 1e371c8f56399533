"""What each optimizer keeps of every parameter, and how long its step takes: passes, products and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.compute import ADAMW_BYTES, optimizer_seconds
from meshwright.cost.copied_heads import divided_by
from meshwright.cost.holdings import TABLE
from meshwright.cost.layouts import Backward, Kind, LayoutArrays
from meshwright.cost.lines import Linear
from meshwright.cost.network import collective
from meshwright.cost.placement import distinct, ring
from meshwright.cost.products import ProductRates
from meshwright.cost.rates import rates
from meshwright.cost.slowest import slowest_share
from meshwright.cost.software import Software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, DeviceSpec, NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import (
    MOMENT_BLOCK,
    STEP_ELEMENTS,
    Adafactor,
    Master,
    Moments,
    Muon,
    Optimizer,
    OptimizerSpec,
    Sgd,
    as_kind,
    treatment,
)
from meshwright.spec.plan import AxisName
from meshwright.spec.tensors import ParameterTensor, prefix, tensors

# Bytes of a parameter that one step of plain SGD reads and writes in fp32, with a moment and without.
_SGD, _PLAIN_SGD = 20.0, 12.0
# Moments unpacked for a step and packed after it, both of them: bf16 is cast twice; bytes are looked up and scaled,
# measured for their largest, divided, and looked up again (dynamic8) or cast (fp8).
_PACKED = {Moments.FP32: 0.0, Moments.BF16: 24.0, Moments.DYNAMIC8: 92.0, Moments.FP8: 60.0}
# A parameter and its gradient cast to fp32, its place counted and hashed in eight bytes, and the sum with its hash.
_ROUNDED = 240.0
# On a processor, whose table look-ups, casts to e4m3 and hashes are slower than its memory, these many bytes take as
# long as they do (docs/lab.md).
_PROCESSOR_PACKED = {**_PACKED, Moments.DYNAMIC8: 300.0, Moments.FP8: 400.0}
_PROCESSOR_ROUNDED = 330.0
# Kernels that a step of narrow AdamW starts for some elements of one parameter: those of the step itself, more where
# its moments are packed, and more where the parameter is rounded.
_STEP_KERNELS, _ROUND_KERNELS = 5, 42
_PACK_KERNELS = {Moments.FP32: 0, Moments.BF16: 4, Moments.DYNAMIC8: 39, Moments.FP8: 31}
# Squares, their means by row and by column, two scalings, the update's square, and it, decayed, onto the parameter.
_ADAFACTOR = 80.0
# Momentum, what looks ahead of it, its cast and that of the update, and it onto the parameter.
_MUON, _MUON_CASTS = 60.0, 2.0


def is_plain(spec: Optimizer) -> bool:
    """AdamW in full precision everywhere: two moments of every parameter."""
    full = isinstance(spec, OptimizerSpec) and not spec.is_narrow
    return full and all(group.kind in (None, spec.kind) for group in spec.groups)


def least_state(spec: Optimizer, *, wide: FloatArray) -> FloatArray:
    """Bytes of state that every parameter has at the least, whatever its name, of elements of `wide` bytes."""
    each = [_packed_bytes(rule, np.asarray(1.0)) if _packs(rule) else _moments(rule) * wide for rule in _rules(spec)]
    return np.asarray(np.min(np.stack([value + 0.0 * wide for value in each]), axis=0))


def least_seconds(owned: FloatArray, *, spec: Optimizer, device: DeviceSpec) -> FloatArray:
    """Seconds of a step over `owned` parameters at the least, whatever their names."""
    whole = optimizer_seconds(owned, device=device, clipped=spec.clip_norm is not None)
    if is_plain(spec):
        return whole
    fastest = max(device.optimizer_bandwidth or 0.0, device.memory_bandwidth)
    return np.asarray(owned * min(_passes(rule, 0.0) for rule in _rules(spec)) / fastest)


def host_bytes(spec: Optimizer, software: Software) -> float:
    """Bytes of a parameter that a step of a host reads and writes in fp32, of the rule of most: 28 by AdamW, and what
    the software passes beside it. Where one kernel steps it in whatever it is kept, as much as in full precision."""
    most = max(_host_passes(rule, software) for rule in _rules(spec))
    return most + software.host_bytes


def _host_passes(rule: Optimizer, software: Software) -> float:
    if software.steps_narrow and isinstance(rule, OptimizerSpec):
        return ADAMW_BYTES
    return float(_passes(rule, 4.0, processor=True))


def mean_moments(model: ModelSpec, spec: Optimizer) -> float:
    """Elements of state for each parameter of the whole model."""
    if is_plain(spec):
        return 2.0
    kept = sum(
        _elements(treatment(spec, prefix(block, index) + entry.name).rule, entry, {}).item()
        for index, block in enumerate(model.blocks)
        for entry in tensors(block)
    )
    return kept / sum(block.parameters for block in model.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimized:
    """Rows of plans, blocks of each kind on their ranks (`counts`, as memory has them), and the optimizer.

    `one_kernel` steps AdamW as soon as in full precision, whatever moments and parameters are kept in.
    """

    table: PlanTable
    arrays: LayoutArrays
    counts: Mapping[str, FloatArray]
    model: ModelSpec
    spec: Optimizer
    one_kernel: bool = False

    def of_extent(self, table: PlanTable, counts: Mapping[str, FloatArray]) -> Optimized:
        """The same of some blocks alone, which `table` takes all for."""
        return replace(self, table=table, counts=counts)

    def held(self, kind: Kind) -> Iterator[Treated]:
        """Every tensor of blocks of `kind`; blocks that are alike but for their names may be treated unlike."""
        indexes = [index for index, block in enumerate(self.model.blocks) if block == kind.block]
        rows = kind.rows(self.table)
        named = any(group.kind is not None for group in self.spec.groups)
        for entry in tensors(kind.block):
            names = [prefix(kind.block, index) + entry.name for index in (indexes if named else indexes[:1])]
            rules = [treatment(self.spec, name).rule for name in names]
            for rule in dict.fromkeys(rules):
                share = rules.count(rule) / len(rules)
                yield Treated(tensor=entry, rule=rule, share=share, cuts=_cuts(entry, rows))

    def everywhere(self, of: Callable[[Treated], FloatArray]) -> FloatArray:
        """The sum over the trained blocks of every rank of what `of` says of a tensor, shape (rows, ranks)."""
        zeros = np.zeros(len(self.table))
        each = [
            sum((of(entry) * entry.share for entry in self.held(kind)), zeros)
            if kind.backward is Backward.WHOLE
            else zeros
            for kind in self.arrays.kinds
        ]
        return np.asarray(np.einsum("nrk,nk->nr", self.counts["total"][..., :-1], np.stack(each, axis=1)))

    def rest(self, owned: FloatArray) -> FloatArray:
        """Of `owned`, what is in no block of the rank: a copy of a tied table, and towers."""
        return np.maximum(owned - self.everywhere(lambda entry: entry.local), 0.0)

    @property
    def of_table(self) -> Treated:
        """The embedding's table, as what is in no block is treated."""
        entry = tensors(self.model.embedding)[0]
        rule = treatment(self.spec, TABLE).rule
        return Treated(tensor=entry, rule=rule, share=1.0, cuts=_cuts(entry, self.table))


def kept_bytes(found: Optimized, owned: FloatArray) -> FloatArray:
    """Bytes of optimizer state on every rank, which has `owned` parameters after sharding; shape (rows, ranks)."""
    wide = state_bytes(found.table).wide
    if is_plain(found.spec):
        return 2.0 * owned * wide[:, None]

    def kept(entry: Treated) -> FloatArray:
        if _packs(entry.rule):
            return _packed_bytes(entry.rule, entry.local)
        return _elements(entry.rule, entry.tensor, entry.cuts) * wide

    copied = found.of_table
    return found.everywhere(kept) + found.rest(owned) * (kept(copied) / copied.local)[:, None]


def step_bytes(found: Optimized) -> FloatArray:
    """Bytes that one step needs for a moment on every rank, shape (rows, ranks): of its largest tensor.

    Fused kernels need none, and narrow AdamW some elements at a time in full. Adafactor squares what a rank owns of it.
    Muon has a matrix whole, in the precision that multiplies: its parts as they leave and come back, itself before and
    after a product, and two squares of its rows.
    """
    total = found.counts["total"]
    most = np.zeros(total.shape[:2])
    if is_plain(found.spec):
        return most
    sizes = state_bytes(found.table)
    for index, kind in enumerate(found.arrays.kinds):
        for entry in found.held(kind):
            needed = np.zeros(len(found.table))
            if isinstance(entry.rule, Adafactor):
                needed = entry.local * sizes.master
            elif _is_narrow(entry.rule):
                needed = np.minimum(entry.local, STEP_ELEMENTS) * _narrow_step(entry.rule)
            elif isinstance(entry.rule, Muon):
                rows, columns = entry.tensor.shape[-2:]
                whole = entry.stack * (4.0 * rows * columns + 2.0 * min(rows, columns) ** 2)
                needed = whole * sizes.compute
            most = np.where(total[..., index] > 0.0, np.maximum(most, needed[:, None]), most)
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """What a step of another optimizer than AdamW depends on: products of whole matrices, and their way to one rank."""

    products: ProductRates
    over_shards: Linear
    over_tensor: Linear


def update_rates(
    table: PlanTable, *, group: NodeGroup, cluster: ClusterSpec, job: JobSpec, software: Software
) -> UpdateRates | None:
    """Of every row; None where no matrix is made whole. Raises ConfigError where the device lacks a peak."""
    if not any(isinstance(rule, Muon) for rule in _rules(job.optimizer)):
        return None
    alike, inverse = distinct(table)

    def exchange(*axes: AxisName) -> Linear:
        around = ring(alike, axes, group=group, cluster=cluster)
        return collective(Collective.ALL_TO_ALL, around, group=group, cluster=cluster).take(inverse)

    figures = rates(group.device, precision=table.precision, length=job.sequence_length, software=software).slowed(
        slowest_share(table.world / table.pipeline, spread=group.device.spread)
    )
    return UpdateRates(
        products=figures.head,
        over_shards=exchange(AxisName.SHARD, AxisName.CONTEXT),
        over_tensor=exchange(AxisName.TENSOR),
    )


def update_seconds(found: Optimized, owned: FloatArray, *, device: DeviceSpec) -> FloatArray:
    """Seconds of one optimizer step on every rank but for what makes matrices orthogonal, shape (rows, ranks)."""
    whole = optimizer_seconds(owned, device=device, clipped=found.spec.clip_norm is not None)
    if found.one_kernel or is_plain(found.spec):
        return whole
    bandwidth = device.memory_bandwidth * device.memory_fraction
    plain = ADAMW_BYTES / (device.optimizer_bandwidth or bandwidth)
    compute = state_bytes(found.table).compute

    processor = device.kind is DeviceKind.CPU

    def seconds(rule: Optimizer) -> FloatArray:
        by_adamw = isinstance(rule, OptimizerSpec)
        passes = _passes(rule, 0.0 if by_adamw else compute, processor=processor)
        return (plain * passes / ADAMW_BYTES if by_adamw else passes / bandwidth) + np.zeros(len(found.table))

    def taken(entry: Treated) -> FloatArray:
        runs = np.ceil(entry.local / STEP_ELEMENTS)
        return entry.local * seconds(entry.rule) + runs * step_kernels(entry.rule) * device.launch_seconds

    total = whole - plain * owned + found.everywhere(taken)
    return total + found.rest(owned) * seconds(found.of_table.rule)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Treated:
    """A tensor of a kind of block, `share` of whose blocks have it treated by `rule`; `cuts` divide its dims by row."""

    tensor: ParameterTensor
    rule: Optimizer
    share: float
    cuts: Mapping[int, FloatArray]

    @property
    def local(self) -> FloatArray:
        """Elements of one block that a rank owns, shape (rows,)."""
        return np.asarray(self.tensor.size / np.prod(list(self.cuts.values()), axis=0))

    @property
    def is_stack(self) -> bool:
        """A matrix for each expert, of which the first dim counts."""
        return len(self.tensor.shape) > 2

    @property
    def stack(self) -> FloatArray:
        """Matrices of one block that a rank has all or part of, shape (rows,)."""
        return np.asarray(self.tensor.shape[0] / self.cuts[0] if self.is_stack else np.ones_like(self.cuts[0]))

    @property
    def sharing(self) -> FloatArray:
        """Ranks that have parts of the same matrices, shape (rows,)."""
        through = [ways for dim, ways in self.cuts.items() if not (self.is_stack and dim == 0)]
        return np.asarray(np.prod([np.ones_like(self.cuts[0]), *through], axis=0))


def _cuts(tensor: ParameterTensor, table: PlanTable) -> dict[int, FloatArray]:
    """Ranks that divide each dim, shape (rows,): sharding divides the first."""
    gridded = table.on_grid & tensor.grid
    shards = np.where(table.sharding > 0, np.where(gridded, table.expert_divided, table.divided), 1)
    found = {0: shards * np.where(gridded, table.expert, 1).astype(np.float64)}
    if tensor.divided is not None:
        inside = np.where(gridded, table.expert_tensor, table.tensor).astype(np.float64)
        inside = np.where(table.tensor_grid > 0, inside, divided_by(tensor, inside))
        found[tensor.divided] = found.get(tensor.divided, 1.0) * inside
    return found


def _elements(rule: Optimizer, tensor: ParameterTensor, cuts: Mapping[int, FloatArray]) -> FloatArray:
    """Elements of state that a rank keeps of one tensor; means that a cut goes across are on all its ranks."""
    lengths = [size / np.asarray(cuts.get(dim, 1.0)) for dim, size in enumerate(tensor.shape)]
    if not isinstance(rule, Adafactor) or not tensor.is_matrix:
        moments = 1.0 if isinstance(rule, Adafactor) else _moments(rule)
        return np.asarray(moments * _product(lengths))
    return np.asarray(_product(lengths[:-1]) + _product([*lengths[:-2], lengths[-1]]))


def _packs(rule: Optimizer) -> bool:
    return isinstance(rule, OptimizerSpec) and rule.state is not Moments.FP32


def _is_narrow(rule: Optimizer) -> bool:
    return isinstance(rule, OptimizerSpec) and rule.is_narrow


def _packed_bytes(rule: Optimizer, elements: FloatArray) -> FloatArray:
    """Of both moments of `elements` that lie together, a scale in fp32 for each block of them."""
    assert isinstance(rule, OptimizerSpec)
    if not rule.state.in_blocks:
        return 4.0 * elements
    return 2.0 * (elements + 4.0 * np.ceil(elements / MOMENT_BLOCK))


def _narrow_step(rule: Optimizer) -> float:
    """Bytes an element that a step of narrow AdamW needs: two moments and what packs one, or places and their hash."""
    assert isinstance(rule, OptimizerSpec)
    packed = 24.0 if rule.state.in_blocks else 8.0 if rule.state is Moments.BF16 else 0.0
    return packed + (48.0 if rule.master is Master.BF16_STOCHASTIC else 0.0)


def _product(lengths: Sequence[FloatArray]) -> FloatArray:
    total: FloatArray = np.asarray(1.0)
    for length in lengths:
        total = total * length
    return total


def _moments(rule: Optimizer) -> float:
    """Elements of state for each element of a matrix; Adafactor's means are fewer than any share of them."""
    if isinstance(rule, OptimizerSpec):
        return 2.0
    if isinstance(rule, Sgd):
        return 1.0 if rule.momentum else 0.0
    return 1.0 if isinstance(rule, Muon) else 0.0


def step_kernels(rule: Optimizer) -> int:
    """Kernels that a step starts for each parameter, or STEP_ELEMENTS of it; rules that start them for all at once have
    none here."""
    if not _is_narrow(rule):
        return 0
    assert isinstance(rule, OptimizerSpec)
    rounds = _ROUND_KERNELS if rule.master is Master.BF16_STOCHASTIC else 0
    return _STEP_KERNELS + _PACK_KERNELS[rule.state] + rounds


def _passes(rule: Optimizer, compute: FloatArray | float, *, processor: bool = False) -> FloatArray | float:
    """Bytes of a parameter that a step moves, beside products, or that take a processor as long."""
    if isinstance(rule, OptimizerSpec):
        packed, each = (_PROCESSOR_PACKED, _PROCESSOR_ROUNDED) if processor else (_PACKED, _ROUNDED)
        return ADAMW_BYTES + packed[rule.state] + (each if rule.master is Master.BF16_STOCHASTIC else 0.0)
    if isinstance(rule, Sgd):
        return _SGD if rule.momentum else _PLAIN_SGD
    return _MUON + _MUON_CASTS * compute if isinstance(rule, Muon) else _ADAFACTOR


def _rules(spec: Optimizer) -> tuple[Optimizer, ...]:
    """Every rule that some name may have."""
    kinds = {spec.kind, *(group.kind for group in spec.groups if group.kind is not None)}
    kinds |= {"adamw"} if isinstance(spec, Muon) else set()
    return tuple(as_kind(spec, kind) for kind in sorted(kinds))
