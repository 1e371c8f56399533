"""What operators of a block depend on, as a stack of software runs them on a device."""

from __future__ import annotations

import numpy as np

from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray, IntArray
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.cluster import DeviceKind, DeviceSpec
from meshwright.spec.job import JobSpec


def operator_sizes(
    *,
    batch: FloatArray,
    tensor: FloatArray,
    split: FloatArray,
    context: FloatArray | float = 1.0,
    inner: FloatArray | float = 1.0,
    gathers: BoolArray | bool = False,
    token_layout: IntArray | None = None,
    expert: FloatArray | float = 0.0,
    expert_tensor: FloatArray | float = 0.0,
    slices: FloatArray | float = 1.0,
    grid_dims: FloatArray | float = 1.0,
    itemsize: FloatArray,
    product_itemsize: FloatArray | None = None,
    device: DeviceSpec,
    job: JobSpec,
    software: Software,
) -> Sizes:
    """What operators depend on for microbatches of `batch` sequences of `job` as `software` runs them on `device`."""
    widens = software.widens(device.kind, length=job.sequence_length)
    return Sizes(
        batch=batch,
        sequence=float(job.sequence_length),
        tensor=tensor,
        split=split,
        context=context,
        inner=inner,
        gathers=gathers,
        token_layout=token_layout,
        expert=expert,
        expert_tensor=expert_tensor,
        slices=slices,
        grid_dims=grid_dims,
        itemsize=itemsize,
        masked=job.data.document_mask and software.masks_documents(device.kind),
        dense_masks=software.dense_masks,
        scores_at_once=software.scores_at_once,
        composite_norms=software.writes_norms_out(device.kind),
        eager=software.eager and not software.compiled,
        attention_itemsize=np.maximum(4.0, itemsize) if widens else itemsize,
        processor=device.kind is DeviceKind.CPU,
        grouped_experts=software.grouped_experts and device.kind is not DeviceKind.CPU,
        product_itemsize=product_itemsize,
        added_biases=software.adds_biases,
        summed_biases=software.sums_biases,
        dropout=software.dropout,
        unfused=not software.fused_attention,
        loss_kernel=software.loss_kernel,
        fused_loss=software.fused_loss,
        whole_logits=software.whole_logits,
        loss_chunks=software.loss_chunks,
        experts=software.experts,
        tokens_first=software.tokens_first,
    )
