"""Host time of a layer beside the kernels that it starts."""

from __future__ import annotations

import numpy as np

from meshwright.cost.software import Software
from meshwright.cost.table import SHARDINGS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.model import Block, Layer, Mixture
from meshwright.spec.plan import Sharding
from meshwright.spec.tensors import tensors

_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)


def host_extra(block: Block, table: PlanTable, *, device: DeviceSpec, software: Software) -> FloatArray:
    """Host seconds per layer and pass that no kernel explains: measured on the device, else the software's; and those
    to fetch and release the parameters of module after module where hooks do so."""
    if not isinstance(block, Layer):
        return np.zeros(len(table))
    extra = np.where(table.tensor > 1, device.tensor_layer_seconds, 0.0)
    mixed = isinstance(block.transform, Mixture)
    extra += device.layer_seconds or software.host_seconds(device.kind, mixed=mixed)
    extra += np.where(table.context > 1, device.context_layer_seconds, 0.0)
    extra += np.where(table.sharding == _ZERO3, software.fetch_seconds * _modules(block), 0.0)
    return np.asarray(extra + np.where(table.sharding > 0, device.shard_layer_seconds, 0.0), dtype=np.float64)


def _modules(layer: Layer) -> int:
    """Modules of a layer that have parameters of their own: experts are modules one by one."""
    weights = [tensor for tensor in tensors(layer) if not tensor.name.endswith("bias")]
    return sum(tensor.shape[0] if len(tensor.shape) == 3 else 1 for tensor in weights)
