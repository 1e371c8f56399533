"""Buffers that live as long as a run, beside parameters and what a step makes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.cost.block_bytes import FULL, SELECTIVE, recomputes
from meshwright.cost.kept_keys import all_joined
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.software import Software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.vocabulary import first_rows
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind, DeviceSpec, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import (
    Attention,
    Block,
    FeedForward,
    LatentAttention,
    Layer,
    Mixture,
    ModelSpec,
    Recurrence,
)

Shape = tuple[str, float, float]

# PyTorch's workspace for matrix products (notes on CUDA semantics, CUBLAS_WORKSPACE_CONFIG): 32 MiB on Hopper and
# later, :4096:2:16:8 before; Transformer Engine has one of its own of 32 MiB there and 4 MiB before.
_WORKSPACE_BYTES = {True: 32.0 * 2**20, False: 2.0 * 4096 * 1024 + 8.0 * 16 * 1024}
_ENGINE_WORKSPACE_BYTES = {True: 32.0 * 2**20, False: 4.0 * 2**20}
_DENSE, _EXPERT = "dense", "expert"


def fixed_bytes(
    table: PlanTable,
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
    device: DeviceSpec,
    job: JobSpec,
    software: Software,
) -> FloatArray:
    """Bytes on every rank, shape (rows, ranks)."""
    found = np.zeros(counts["total"].shape[:2]) + workspace_bytes(device, software=software)
    if software.eager:
        masked = job.data.document_mask and software.masks_documents(device.kind)
        found = found + _lasting_tensors(table, counts["total"][..., -1], model=model, job=job, masked=masked)
    if software.keeps_logits:
        found = found + _last_logits(table, arrays=arrays, counts=counts, model=model, job=job)
    return found + _placeholders(table, arrays=arrays, counts=counts) if software.placeholders else found


def _last_logits(
    table: PlanTable, *, arrays: LayoutArrays, counts: Mapping[str, FloatArray], model: ModelSpec, job: JobSpec
) -> FloatArray:
    """Logits in fp32 of the microbatch before, on ranks that have a head and more than one microbatch."""
    tokens = table.microbatch * job.sequence_length / table.context
    logits = tokens * first_rows(model.head.vocab, table.tensor.astype(np.float64)) * (table.microbatches > 1)
    here = arrays.of(model.head, counts["total"]) > 0
    return np.asarray(np.where(here, 4.0 * logits[:, None], 0.0), dtype=np.float64)


def workspace_bytes(device: DeviceSpec, *, software: Software) -> float:
    """Bytes that libraries of matrix products take of the allocator for themselves."""
    if device.kind is not DeviceKind.CUDA:
        return 0.0
    recent = Precision.FP8 in device.peak_flops
    return _WORKSPACE_BYTES[recent] + (_ENGINE_WORKSPACE_BYTES[recent] if software.placeholders else 0.0)


def _placeholders(table: PlanTable, *, arrays: LayoutArrays, counts: Mapping[str, FloatArray]) -> FloatArray:
    """One tensor for every shape of weight on the rank, in the precision that multiplies."""
    total = counts["total"]
    holders: dict[Shape, list[int]] = {}
    for index, kind in enumerate(arrays.kinds):
        for shape in _weights(kind.block):
            holders.setdefault(shape, []).append(index)
    slices = np.where(table.on_grid, np.maximum(table.expert_tensor, 1), table.tensor)
    found = np.zeros(total.shape[:2])
    for (where, rows, columns), indexes in holders.items():
        present = (total[..., indexes] > 0).any(axis=-1)
        size = rows * columns / (slices if where == _EXPERT else table.tensor) * state_bytes(table).compute
        found = found + np.where(present, size[:, None], 0.0)
    return found


def _weights(block: Block) -> set[Shape]:
    """Shapes of the weights of a layer that Transformer Engine multiplies: gates beside their partners, queries beside
    keys and values."""
    if not isinstance(block, Layer):
        return set()
    shapes: set[Shape] = set()
    for part in block.parts:
        width = float(part.width)
        if isinstance(part, Attention):
            values, queries = 1 if part.shared_key_value else 2, 2 if part.gated else 1
            shapes.add((_DENSE, float((queries * part.heads + values * part.kv_heads) * part.head_dim), width))
            shapes.add((_DENSE, width, float(part.heads * part.head_dim)))
        elif isinstance(part, LatentAttention):
            query = float(part.heads * (part.nope_dim + part.rope_dim))
            shapes.add((_DENSE, query, float(part.query_rank or width)))
            shapes.add((_DENSE, float(part.heads * (part.nope_dim + part.value_dim)), float(part.kv_rank)))
            shapes.add((_DENSE, width, float(part.heads * part.value_dim)))
        elif isinstance(part, FeedForward):
            shapes |= _two_products(_DENSE, part.hidden, width, gated=part.gated)
        elif isinstance(part, Mixture):
            shapes |= _two_products(_EXPERT, part.hidden, width, gated=part.gated)
            if part.shared is not None:
                shapes |= _two_products(_DENSE, part.shared.hidden, width, gated=part.shared.gated)
        else:
            assert isinstance(part, Recurrence)
            shapes.add((_DENSE, width, float(part.inner)))
    return shapes


def _two_products(where: str, hidden: int, width: float, *, gated: bool) -> set[Shape]:
    return {(where, float(hidden) * (2.0 if gated else 1.0), width), (where, width, float(hidden))}


def _angles(model: ModelSpec) -> float:
    """Of one position, all rotaries' together."""
    rotaries = {getattr(layer.mixer, "rotary", None) for layer in model.layers} - {None}
    return float(sum(rotary.dims for rotary in rotaries if rotary is not None))


def _masks(table: PlanTable, *, model: ModelSpec, job: JobSpec, masked: bool) -> FloatArray:
    """Bytes of all masks of a microbatch, shape (rows,): of every sequence where attention is `masked` by documents.
    Slices have masks of the keys that they meet, all but the first in any case; of context ranks only tiles have.
    """
    length, slices, mixers = (
        float(job.sequence_length),
        table.slices.astype(np.float64),
        [layer.mixer for layer in model.layers],
    )
    limits = {
        (mixer.window, getattr(mixer, "chunk", None))
        for mixer in mixers
        if isinstance(mixer, (Attention, LatentAttention))
    }
    cut = [pair for pair in limits if masked or any(limit is not None and limit < length for limit in pair)]
    each = np.where(table.context > 1, 0.0, length**2)
    whole = len(cut) * (table.microbatch if masked else 1.0) * (slices + 1.0) / (2.0 * slices)
    return np.asarray(each * (whole + (len(limits) - len(cut)) * all_joined(slices) / slices**2), dtype=np.float64)


def shared_bytes(
    table: PlanTable,
    *,
    arrays: LayoutArrays,
    model: ModelSpec,
    job: JobSpec,
    device: DeviceSpec,
    software: Software,
) -> list[FloatArray]:
    """Bytes that the layers of a stage share in a pass and that live until its backward, shape (rows,), as a layer of
    each kind has them do: masks where it is computed again, and the angles of its own positions that a context rank
    picks."""
    if not software.eager:
        return [np.zeros(len(table))] * len(arrays.kinds)
    masked = job.data.document_mask and software.masks_documents(device.kind)
    masks = _masks(table, model=model, job=job, masked=masked)
    own = job.sequence_length / table.context * _angles(model) * np.maximum(state_bytes(table).compute, 4.0)
    again = [recomputes(kind, table, FULL) | recomputes(kind, table, SELECTIVE) for kind in arrays.kinds]
    return [np.where(table.context > 1, own, np.where(each, masks, 0.0)) for each in again]


def _lasting_tensors(
    table: PlanTable, stages: FloatArray, *, model: ModelSpec, job: JobSpec, masked: bool
) -> FloatArray:
    """Angles of rotary positions in fp32 at the least, which each of a rank's `stages` has for all of its passes, and
    masks of slices, which pass them on; those of whole sequences end with the pass. Shape (rows, ranks)."""
    wide = np.maximum(state_bytes(table).compute, 4.0)
    masks = np.where(table.slices > 1, _masks(table, model=model, job=job, masked=masked) / table.slices, 0.0)
    angles = stages * (job.sequence_length * _angles(model) * wide)[:, None]
    return np.asarray(angles + masks[:, None], dtype=np.float64)
