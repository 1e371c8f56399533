"""Bytes of every copy of a parameter that training keeps: parameters, gradients, optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.software import Software
from meshwright.cost.table import PRECISIONS, SHARDINGS, BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceSpec, Precision
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import Sharding
from meshwright.spec.synchronize import PACKINGS

BUCKET_BYTES = 25 * 2**20  # of gradients that meet together where nothing is sharded
ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
ZERO2 = SHARDINGS.index(Sharding.GRADIENTS)
ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
_COPIES = 2.0  # a quantised weight lies by rows and by columns, over the microbatches of a step
_EITHER_WAY = (Precision.FP8,)  # one scale a tensor: devices that multiply either form need one of them
_NARROW = (Precision.FP8, Precision.MXFP8, Precision.NVFP4)  # recipes whose parameters may be quantised themselves
_SENT_ALONE = (Precision.FP8, Precision.NVFP4)  # and of these, whose quantised form travels
_MASTER = np.asarray([8.0 if entry is Precision.FP64 else 4.0 for entry in PRECISIONS])
_ROUNDED = np.asarray([2.0 if entry is Precision.BF16 or entry.quantized else 4.0 for entry in PRECISIONS])
_COMPRESSED = np.asarray([entry in PACKINGS for entry in PRECISIONS])
_REDUCED = np.asarray([float(entry.bytes) for entry in PRECISIONS])
_COPY = np.asarray([2.0 if entry.quantized else float(entry.bytes) for entry in PRECISIONS])
_SENT_NARROW = np.where([entry in _SENT_ALONE for entry in PRECISIONS], [e.stored_bytes for e in PRECISIONS], _COPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter of one row: the master copy, the copy that multiplies, gradients; shape (rows,).

    `wide` are those of an element that an optimizer keeps in full.
    Sharded parameters are `gathered` as the optimizer wrote them: in eight or four bits where those are what the
    software keeps, but under mxfp8, whose two copies are made of bf16 after it travelled.
    """

    master: FloatArray
    compute: FloatArray
    reduced: FloatArray
    gathered: FloatArray
    wide: FloatArray


def state_bytes(table: PlanTable, *, narrow: bool = False) -> StateBytes:
    """Masters and gradients are fp32 (fp64 under fp64), bf16 where the job keeps them so; the copy that multiplies has
    the row's precision."""

    return StateBytes(
        gathered=(_SENT_NARROW if narrow else _COPY)[table.precision],
        wide=_MASTER[table.precision],
        master=(_MASTER if table.master is Master.FP32 else _ROUNDED)[table.precision],
        compute=_COPY[table.precision],
        reduced=_REDUCED[table.gradient_precision],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Parameters of every rank, shape (rows, ranks): `whole` before sharding and `owned` after it; `layers` of the
    former are in layers. `trained` and `trained_owned` are what of both has gradients. Of what is sharded, `stays` are
    those of `whole` that no pass frees, `summed` those of `trained` whose gradients are summed whole, and
    `summed_owned` what this rank owns of those; experts that lie whole on their rank are `apart`, and those that are
    `units` of their own are shards of other ranks than the rest. `moments` are bytes
    of the optimizer's state, and `step` those that one step of it needs for a moment; `left` what is kept of gradients
    that do not travel whole, and `repeated` those of `trained_owned` whose gradients replicas sum."""

    whole: FloatArray
    owned: FloatArray
    trained: FloatArray
    trained_owned: FloatArray
    stays: FloatArray
    summed: FloatArray
    summed_owned: FloatArray
    apart: FloatArray
    units: FloatArray
    layers: FloatArray
    moments: FloatArray
    step: FloatArray
    left: FloatArray
    repeated: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of parameters, optimizer state and gradients of every rank, shape (rows, ranks).

    Gradients that exist `before` a step's first backward, `summed` over microbatches once there are any, and `after`
    the last one; `step` is what the optimizer needs for a moment. Of the parameters those `gathered` are copies of what
    other ranks own, which are dropped as backwards end; `share` is the part of a trained parameter whose gradient is
    here in the end, of experts that are units of their own `beyond` more bytes (or fewer); but of experts apart the
    step's first backward adds `apart` bytes each. `left` of the
    gradients is what rounding or compressing them leaves from step to step.
    """

    parameters: FloatArray
    optimizer: FloatArray
    before: FloatArray
    summed: FloatArray
    after: FloatArray
    step: FloatArray
    gathered: FloatArray
    share: FloatArray
    beyond: FloatArray | float = 0.0
    apart: FloatArray | float = 0.0
    left: FloatArray | float = 0.0


def states(table: PlanTable, local: Local, *, away: BoolArray, software: Software, device: DeviceSpec) -> States:
    """What each rank keeps of its parameters.

    Where the optimizer's state is `away` in the host's memory, none of it is here.
    """
    copied = software.keeps_copies
    kept = _with_copies(table, local, software=software, device=device) if copied else _masters(table, local)
    here = ~away[:, None]
    return replace(kept, optimizer=np.where(here, kept.optimizer, 0.0), step=np.where(here, kept.step, 0.0))


def without_parameters(found: States, away: BoolArray, *, table: PlanTable, local: Local) -> States:
    """`found` but for rows whose shards of parameters and of gradients are `away` in the host's memory: those that
    replicas sum go there when all of a step are summed."""
    here, stays = ~away[:, None], local.repeated * state_bytes(table).master[:, None]
    return replace(
        found,
        parameters=np.where(here, found.parameters, 0.0),
        before=np.where(here, found.before, 0.0),
        summed=np.where(here, found.summed, stays),
        after=np.where(here, found.after, 0.0),
        share=np.where(here, found.share, local.repeated / np.maximum(local.trained, 1.0)),
        beyond=np.where(here, found.beyond, 0.0),
        left=np.where(here, found.left, 0.0),
    )


def _masters(table: PlanTable, local: Local) -> States:
    """Parameters are the optimizer's masters; zero1 sums whole gradients until it scatters them once."""
    sizes = state_bytes(table)
    master, compute = (size[:, None] for size in (sizes.master, sizes.compute))
    sharded, left = (table.sharding > 0)[:, None], local.left
    bucketed = ~sharded & ((table.meeting * table.context)[:, None] > 1)
    share = (local.summed + local.trained_owned - local.summed_owned) * master
    experts, met = local.apart * master, experts_meet(table)[:, None]
    each = 1.0 / np.maximum(table.expert_divided, 1)[:, None]
    others = np.maximum(local.trained - local.apart - local.units, 1.0)
    rest = (local.trained_owned - local.apart - local.units * each) / others
    return States(
        parameters=local.owned * master + local.stays * compute,
        optimizer=local.moments,
        step=local.step,
        before=np.where(bucketed, share - experts, 0.0) + np.where(met, experts, 0.0) + left,
        summed=share + left,
        after=np.where(sharded, local.trained_owned, local.trained) * master + left,
        gathered=local.stays * compute,
        share=rest,
        beyond=np.where(local.units > 0.0, master * (each - rest), 0.0),
        apart=np.where(met, 0.0, master),
        left=left,
    )


def left_bytes(table: PlanTable, *, trained: FloatArray, owned: FloatArray) -> FloatArray:
    """Bytes of what rounding leaves of gradients that travel rounded, of so many `trained` parameters before sharding
    and so many `owned` after it, all of shape (rows, ranks).

    Of all that a rank sends; where every rank is sent the sum back, of its own part of it too. Replicas and the ranks
    that share what is sharded, or a sequence, meet one after the other.
    """
    inside, sharded = table.shard * table.context, table.sharding > 0
    replicas = replicas_meeting(table)
    narrow = _COMPRESSED[table.gradient_precision] * _MASTER[table.precision]
    both = [np.where(ranks > 1, 1.0 + 1.0 / ranks, 0.0) for ranks in (replicas, inside)]
    within = np.where(sharded, 1.0 * (inside > 1), both[0] + both[1])
    apart = np.where(sharded, both[0], 0.0)
    return np.asarray(trained * (narrow * within)[:, None] + owned * (narrow * apart)[:, None])


def experts_apart(table: PlanTable) -> BoolArray:
    """Rows whose experts lie whole on their ranks: none is gathered, and gradients of theirs meet, if at all, in
    buckets of their own; shape (rows,)."""
    if not table.on_grid.any():
        return np.zeros(len(table), dtype=np.bool_)
    return np.asarray(table.on_grid & ((table.sharding == 0) | (table.expert_divided == 1)))


def experts_units(table: PlanTable) -> BoolArray:
    """Rows whose experts are shards of other ranks than the rest, and units of their own: they are gathered, and their
    gradients reduced, apart from the rest of their layer; shape (rows,)."""
    if not table.on_grid.any():
        return np.zeros(len(table), dtype=np.bool_)
    return np.asarray(table.on_grid & (table.sharding > 0) & (table.expert_divided > 1))


def experts_meet(table: PlanTable) -> BoolArray:
    """Rows some of whose ranks hold the same experts and sum whole gradients of them, shape (rows,)."""
    shards = np.where(table.sharding == 0, table.expert_divided, 1)
    return np.asarray(experts_apart(table) & (shards * table.expert_replicas > 1))


def replicas_meeting(table: PlanTable) -> IntArray:
    """Ranks that meet in every step and repeat what others have, shape (rows,)."""
    return np.asarray(table.meeting // table.shard)


def _with_copies(table: PlanTable, local: Local, *, software: Software, device: DeviceSpec) -> States:
    """Parameters in the precision that multiplies beside fp32 masters, and gradients in one buffer that stays, where
    software keeps them with those of the last microbatch.

    Gradients that add up in less than fp32 are copied to fp32 for the optimizer's step.
    """
    sizes = state_bytes(table)
    master, compute, reduced = (size[:, None] for size in (sizes.master, sizes.compute, sizes.reduced))
    sharding = table.sharding[:, None]
    wide = compute < master
    added = np.where(wide, compute if software.adds_narrow else reduced, master)
    terms = np.where(compute < added, compute, 0.0) * software.keeps_terms
    gradients = np.where(sharding < ZERO2, local.trained, local.trained_owned) * (added + terms)
    return States(
        parameters=_parameters(table, local, compute=compute, software=software, device=device),
        optimizer=local.moments + local.trained_owned * np.where(wide, master, 0.0),
        step=local.step,
        before=gradients,
        summed=gradients,
        after=gradients + np.where(added < master, local.trained_owned * master, 0.0),
        gathered=np.zeros_like(gradients),
        share=np.ones_like(gradients),
    )


def _parameters(
    table: PlanTable, local: Local, *, compute: FloatArray, software: Software, device: DeviceSpec
) -> FloatArray:
    """Bytes of the copy that multiplies: of layers quantised beside it or, where software keeps no other, instead.

    A device with units of four bits multiplies eight-bit matrices as they lie or transposed, others need both copies
    (Transformer Engine's is_non_tn_fp8_gemm_supported: compute capability 10.0).
    Where parameters are sharded, a block's quantised copies are made as it is gathered, and go with it.
    """
    sharded = (table.sharding == ZERO3)[:, None]
    held = np.where(sharded, local.owned, local.whole)
    layers = np.where(sharded, local.layers * local.owned / np.maximum(local.whole, 1.0), local.layers)
    either = Precision.NVFP4 in device.peak_flops
    count = [1.0 if either and entry in _EITHER_WAY else _COPIES for entry in PRECISIONS]
    each = [number * entry.stored_bytes * entry.quantized for number, entry in zip(count, PRECISIONS, strict=True)]
    copies = np.asarray(each)[table.precision][:, None]
    alone = np.asarray([software.narrow_parameters and entry in _NARROW for entry in PRECISIONS])[table.precision]
    beside = np.where(sharded, 0.0, copies * layers)
    return np.asarray(held * compute + np.where(alone[:, None], layers * (copies - compute), beside))
