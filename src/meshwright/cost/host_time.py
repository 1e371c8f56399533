"""Host time of a layer beside the kernels that it starts."""

from __future__ import annotations

import numpy as np

from meshwright.cost.software import Software
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.model import Block, Layer, Mixture


def host_extra(block: Block, table: PlanTable, *, device: DeviceSpec, software: Software) -> FloatArray:
    """Host seconds per layer and pass that no kernel explains: measured on the device, else the software's."""
    if not isinstance(block, Layer):
        return np.zeros(len(table))
    extra = np.where(table.tensor > 1, device.tensor_layer_seconds, 0.0)
    mixed = isinstance(block.transform, Mixture)
    extra += device.layer_seconds or software.host_seconds(device.kind, mixed=mixed)
    extra += np.where(table.context > 1, device.context_layer_seconds, 0.0)
    return np.asarray(extra + np.where(table.sharding > 0, device.shard_layer_seconds, 0.0), dtype=np.float64)
