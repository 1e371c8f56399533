"""Bytes at the peak of every pipeline rank, by part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.cost.kinds import BlockSeconds
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.states import state_bytes
from meshwright.cost.table import SHARDINGS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.plan import Sharding
from meshwright.spec.report import MemoryPart

_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
BUCKET_BYTES = 25.0 * 2**20


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
    """Bytes of every part on every rank shown, shape (rows, ranks)."""
    total = counts["total"]
    parameters = local_parameters(table, blocks, arrays=arrays, counts=counts, model=model)
    largest = np.zeros(total.shape[:2])
    working = np.zeros(total.shape[:2])
    kept = {name: np.zeros(total.shape[:2]) for name in ("first", "last", "total")}
    logits = {name: np.zeros(total.shape[:2]) for name in ("first", "last", "total")}
    for index, (kind, block) in enumerate(zip(arrays.kinds, blocks, strict=True)):
        present = total[..., index] > 0
        working = np.where(present, np.maximum(working, block.bytes.working[:, None]), working)
        if isinstance(kind, Layer):
            largest = np.where(present, np.maximum(largest, block.parameters[:, None]), largest)
        for name in kept:
            number = counts[name][..., index]
            kept[name] = kept[name] + number * block.bytes.kept[:, None]
            logits[name] = logits[name] + number * block.bytes.logits[:, None]
    states = _states(table, parameters, largest)
    hidden = _hidden_bytes(table, model=model, job=job)[:, None]
    sends = np.where(table.pipeline > 1, 2.0, 0.0)[:, None] * hidden
    activations = held(shape, first=kept["first"], last=kept["last"], total=kept["total"])
    return {
        MemoryPart.PARAMETERS: states["parameters"],
        MemoryPart.GRADIENTS: states["gradients"],
        MemoryPart.OPTIMIZER: states["optimizer"],
        MemoryPart.ACTIVATIONS: activations,
        MemoryPart.LOGITS: held(shape, first=logits["first"], last=logits["last"], total=logits["total"]),
        MemoryPart.BUFFERS: states["buffers"] + working + sends,
        MemoryPart.RESERVED: np.where(shape.valid, device.reserved_bytes, 0.0),
    }


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
    embeds = total[..., arrays.kinds.index(model.embedding)]
    heads = total[..., arrays.kinds.index(model.head)]
    if model.head.tied:
        copied = np.maximum(heads - embeds, 0.0)
        parameters = parameters + copied * (model.head.matrix_parameters / table.tensor)[:, None]
    return np.asarray(parameters + embeds * float(sum(tower.parameters for tower in model.towers)))


def _states(table: PlanTable, parameters: FloatArray, largest: FloatArray) -> dict[str, FloatArray]:
    """What each sharding keeps of parameters, gradients and optimizer state, and what it gathers for a while."""
    sizes = state_bytes(table)
    master, compute, reduced = (entry[:, None] for entry in (sizes.master, sizes.compute, sizes.reduced))
    sharding, shard = table.sharding[:, None], table.shard[:, None].astype(np.float64)
    parts = np.where(sharding > 0, shard, 1.0)
    sharded = sharding > 0
    whole = np.where(sharded & (sharding < _ZERO3), compute, 0.0)
    gathered = np.where(sharding == _ZERO3, 2.0 * largest * compute, 0.0)
    gradients = np.where(sharding == _ZERO1, master, 0.0) + master / parts
    gradients = np.where(sharded, gradients, master)
    scatter = np.where(sharded & (parts > 1.0), 2.0 * largest * reduced, 0.0)
    wire = np.where(~sharded & (table.data[:, None] > 1) & (reduced < master), parameters * reduced, 0.0)
    return {
        "parameters": parameters * (master / parts + whole),
        "gradients": parameters * gradients,
        "optimizer": parameters * 2.0 * master / parts,
        "buffers": gathered + scatter + wire,
    }


def _hidden_bytes(table: PlanTable, *, model: ModelSpec, job: JobSpec) -> FloatArray:
    """Bytes of one microbatch's hidden features in the precision that multiplies, as one tensor rank holds them."""
    split = np.where(table.sequence_parallel, table.tensor, 1)
    return table.microbatch * job.sequence_length * model.width * state_bytes(table).compute / split
