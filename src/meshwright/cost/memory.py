"""Bytes at the peak of every pipeline rank, by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.cost.kinds import BlockSeconds
from meshwright.cost.layouts import Kind, LayoutArrays
from meshwright.cost.offload import optimizes_away
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.states import state_bytes
from meshwright.cost.table import SHARDINGS, BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.plan import Sharding
from meshwright.spec.report import MemoryPart

_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
BUCKET_BYTES = 25.0 * 2**20


_CHUNK_ELEMENTS = 2.0**20  # the loss reads logits in chunks of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a rank holds whatever the moment, shape (rows, ranks): bytes, but `head` and `largest` in parameters."""

    kept: FloatArray
    logits: FloatArray
    one_logits: FloatArray
    working: FloatArray
    largest_kept: FloatArray
    largest: FloatArray
    head: FloatArray
    sends: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A moment that may be the peak: bytes by part beside parameters and optimizer state, shape (rows, ranks)."""

    gradients: FloatArray
    activations: FloatArray
    logits: FloatArray
    buffers: FloatArray


def memory(
    table: PlanTable,
    blocks: list[BlockSeconds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    model: ModelSpec,
    device: DeviceSpec,
    job: JobSpec,
) -> dict[str, FloatArray]:
    """Bytes of every part on every rank shown at the rank's own peak, shape (rows, ranks).

    The peak is the largest of four moments of a step: the loss is formed, the head's backward, the first backward of
    a layer, and the end of the last backward.
    """
    parameters = local_parameters(table, blocks, arrays=arrays, counts=counts, model=model)
    apart = grid_parameters(table, blocks, counts=counts)
    states = _states(table, parameters, apart, summed=_goes_on(counts, shape=shape))
    entry = _held(table, blocks, arrays=arrays, counts=counts, shape=shape, model=model, job=job)
    moments = _moments(table, states, entry)
    names = ("gradients", "activations", "logits", "buffers")
    totals = [sum((getattr(moment, name) for name in names), np.zeros_like(parameters)) for moment in moments]
    best = np.argmax(totals, axis=0)
    peak = {name: np.choose(best, [getattr(moment, name) for moment in moments]) for name in names}
    return {
        MemoryPart.PARAMETERS: states.parameters,
        MemoryPart.GRADIENTS: peak["gradients"],
        MemoryPart.OPTIMIZER: states.optimizer,
        MemoryPart.ACTIVATIONS: peak["activations"],
        MemoryPart.LOGITS: peak["logits"],
        MemoryPart.BUFFERS: peak["buffers"],
        MemoryPart.RESERVED: np.where(shape.valid, device.reserved_bytes, 0.0),
    }


def _held(
    table: PlanTable,
    blocks: list[BlockSeconds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    model: ModelSpec,
    job: JobSpec,
) -> _Held:
    total = counts["total"]
    zeros = np.zeros(total.shape[:2])
    largest, working, largest_kept, head, one_logits = zeros, zeros, zeros, zeros, zeros
    kept = dict.fromkeys(("first", "last", "total"), zeros)
    logits = dict(kept)
    for index, (kind, block) in enumerate(zip(arrays.kinds, blocks, strict=True)):
        present = total[..., index] > 0
        working = np.where(present, np.maximum(working, block.bytes.working[:, None]), working)
        if isinstance(kind.block, Layer):
            largest = np.where(present, np.maximum(largest, block.parameters[:, None]), largest)
            largest_kept = np.where(present, np.maximum(largest_kept, block.bytes.kept[:, None]), largest_kept)
        if kind.block == model.head:
            tied = model.head.matrix_parameters / table.tensor if model.head.tied else 0.0
            head = np.where(present, np.maximum(block.parameters, tied)[:, None], head)
            one_logits = np.where(present, block.bytes.logits[:, None], one_logits)
        for name in kept:
            number = counts[name][..., index]
            kept[name] = kept[name] + number * block.bytes.kept[:, None]
            logits[name] = logits[name] + number * block.bytes.logits[:, None]
    hidden = _hidden_bytes(table, model=model, job=job)[:, None]
    return _Held(
        kept=held(shape, first=kept["first"], last=kept["last"], total=kept["total"]),
        logits=held(shape, first=logits["first"], last=logits["last"], total=logits["total"]),
        one_logits=one_logits,
        working=working,
        largest_kept=largest_kept,
        largest=largest,
        head=head,
        sends=np.where(table.pipeline > 1, 2.0, 0.0)[:, None] * hidden,
    )


def _moments(table: PlanTable, states: _States, entry: _Held) -> list[_Moment]:
    """The loss, the head's backward, a layer's backward, the end of the last backward."""
    sizes = state_bytes(table)
    master, compute, reduced = (size[:, None] for size in (sizes.master, sizes.compute, sizes.reduced))
    sharding = table.sharding[:, None]
    gathered = np.where(sharding == _ZERO3, compute, 0.0)
    moved = np.where(sharding > 0, compute + 2.0 * reduced, compute)
    head = np.where(sharding > 0, 0.0, master) * entry.head * (states.before == 0.0)
    loss = _Moment(
        gradients=states.before,
        activations=entry.kept,
        logits=entry.logits + _loss_bytes(entry.one_logits / compute, compute),
        buffers=entry.sends,
    )
    back = _Moment(
        gradients=states.before + head,
        activations=entry.kept,
        logits=entry.logits,
        buffers=entry.sends + entry.head * (gathered + compute),
    )
    unit = entry.sends + entry.largest * 2.0 * gathered + np.maximum(entry.largest, entry.head) * moved + states.wire
    layer = _Moment(
        gradients=states.before + head,
        activations=entry.kept,
        logits=entry.logits - entry.one_logits,
        buffers=unit + entry.working,
    )
    end = _Moment(
        gradients=states.after,
        activations=np.minimum(entry.largest_kept, entry.kept),
        logits=0.0 * entry.logits,
        buffers=unit + entry.working,
    )
    return [loss, back, layer, end]


def local_parameters(
    table: PlanTable,
    blocks: list[BlockSeconds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """Parameters of every rank after tensor division and before sharding, shape (rows, ranks).

    A tied head away from its embedding holds a copy of the matrix; towers live with the embedding.
    """
    total = counts["total"]
    values = np.stack([block.parameters for block in blocks], axis=1)
    parameters = np.einsum("nrk,nk->nr", total[..., :-1], values)
    embeds = total[..., arrays.kinds.index(Kind(block=model.embedding))]
    heads = total[..., arrays.kinds.index(Kind(block=model.head))]
    if model.head.tied:
        copied = np.maximum(heads - embeds, 0.0)
        parameters = parameters + copied * (model.head.matrix_parameters / table.tensor)[:, None]
    return np.asarray(parameters + embeds * float(sum(tower.parameters for tower in model.towers)))


def grid_parameters(table: PlanTable, blocks: list[BlockSeconds], *, counts: Mapping[str, FloatArray]) -> FloatArray:
    """Of `local_parameters`, those that lie on a grid of experts, shape (rows, ranks)."""
    if not table.on_grid.any():
        return np.zeros(counts["total"].shape[:2])
    values = np.stack([np.where(table.on_grid, block.expert_parameters, 0.0) for block in blocks], axis=1)
    return np.asarray(np.einsum("nrk,nk->nr", counts["total"][..., :-1], values))


def owned_parameters(table: PlanTable, parameters: FloatArray, apart: FloatArray) -> FloatArray:
    """Parameters of every rank after sharding: `apart` are over other ranks than the rest, shape (rows, ranks)."""
    sharded = table.sharding > 0
    dense = np.where(sharded, table.divided, 1)[:, None]
    experts = np.where(sharded, table.expert_divided, 1)[:, None]
    return np.asarray((parameters - apart) / dense + apart / experts)


def _loss_bytes(elements: FloatArray, compute: FloatArray) -> FloatArray:
    """Copies of one chunk: shifted, in fp32 before that where logits are not, and the last one until it is replaced."""
    chunk = np.minimum(elements, _CHUNK_ELEMENTS) * np.maximum(compute, 4.0)
    return np.asarray(chunk * (1.0 + (compute < 4.0) + (elements > _CHUNK_ELEMENTS)), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """Bytes of parameters, optimizer state and gradients of every rank, shape (rows, ranks).

    Gradients that exist `before` the backward at the peak, and `after` the step's last one; `wire` holds gradients on
    their way in less precision.
    """

    parameters: FloatArray
    optimizer: FloatArray
    before: FloatArray
    after: FloatArray
    wire: FloatArray


def _goes_on(counts: Mapping[str, FloatArray], *, shape: Shape) -> BoolArray:
    """Whether microbatches are still to come when a rank first holds all that it ever holds, shape (rows, ranks).

    If so, it holds as much again later, beside the gradients of those that are done.
    """
    stages = {name: counts[name][..., -1] for name in ("first", "last", "total")}
    return np.asarray(held(shape, **stages) < shape.microbatches[:, None] * stages["total"], dtype=np.bool_)


def _states(table: PlanTable, parameters: FloatArray, apart: FloatArray, *, summed: BoolArray) -> _States:
    """What each sharding keeps: zero1 sums whole gradients until it scatters them once.

    Where gradients are `summed` over microbatches, their sum is there at the peak.
    """
    sizes = state_bytes(table)
    master, compute, reduced = (size[:, None] for size in (sizes.master, sizes.compute, sizes.reduced))
    sharding = table.sharding[:, None]
    sharded = sharding > 0
    owned = owned_parameters(table, parameters, apart)
    whole = np.where(sharded & (sharding < _ZERO3), compute, 0.0)
    bucketed = ~sharded & (table.data[:, None] > 1)
    share = np.where(sharding == _ZERO1, parameters, owned) * master
    return _States(
        parameters=owned * master + parameters * whole,
        optimizer=np.where(optimizes_away(table)[:, None], 0.0, owned * 2.0 * master),
        before=np.where(bucketed | summed, share, 0.0),
        after=share + np.where(sharding == _ZERO1, owned * master, 0.0),
        wire=np.where(bucketed & (reduced < master), parameters * reduced, 0.0),
    )


def _hidden_bytes(table: PlanTable, *, model: ModelSpec, job: JobSpec) -> FloatArray:
    """Bytes of one microbatch's hidden features in the precision that multiplies, as one tensor rank holds them."""
    split = np.where(table.sequence_parallel, table.tensor, 1)
    return table.microbatch * job.sequence_length / table.context * model.width * state_bytes(table).compute / split
